"""A run folder: its files, read and written in one place."""
