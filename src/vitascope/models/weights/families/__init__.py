"""Checkpoint families: one file for each library whose checkpoints are read and written."""
