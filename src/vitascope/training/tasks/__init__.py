"""What a run can learn."""
