"""What a finished run shows of itself."""
