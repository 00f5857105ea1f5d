"""The version, which modules read without importing the package."""

__version__ = "0.2.0"
