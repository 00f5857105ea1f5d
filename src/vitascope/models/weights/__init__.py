"""Checkpoints: storing, finding and loading models."""
