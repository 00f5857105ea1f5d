"""Saving and loading the state of an unfinished run."""
