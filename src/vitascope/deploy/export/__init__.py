"""Exported files, int8 and compression."""
