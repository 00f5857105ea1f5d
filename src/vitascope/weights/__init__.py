"""Checkpoints: how a model is stored, found and loaded."""
