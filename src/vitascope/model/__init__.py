"""The Vision Transformer: torch only, and it does not know how it is stored."""
