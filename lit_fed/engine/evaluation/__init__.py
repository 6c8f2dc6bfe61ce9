"""A running federation, tested and asked for predictions."""
