"""What clients keep between rounds, on disk."""
