"""A group of clients as one computation."""
