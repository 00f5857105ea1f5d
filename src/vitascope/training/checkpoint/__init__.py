"""The state of an unfinished run on the disk."""
