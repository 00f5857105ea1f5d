"""What a run is asked for: its options with their traits, and named recipes. No torch."""
