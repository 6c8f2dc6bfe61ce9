"""What is said of that which cannot be read."""
