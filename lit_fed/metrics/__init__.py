"""What a run measures."""
