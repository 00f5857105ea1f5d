"""Models: the Vision Transformer and others, their pixels, weights, texts and engines."""
