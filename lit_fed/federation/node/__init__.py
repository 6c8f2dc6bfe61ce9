"""A node: the data and states of some clients, and their work on request."""
