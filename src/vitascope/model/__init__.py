"""The Vision Transformer: needs torch only, and is independent of storage."""
