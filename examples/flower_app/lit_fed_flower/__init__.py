"""A federation of lit_fed whose messages Flower's SuperLink and SuperNodes carry, by flwr's public API."""
