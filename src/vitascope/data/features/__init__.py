"""Features of frozen bodies: computed, kept in a cache, written to files."""
