"""Sums of which the server sees no term: secure aggregation over nodes."""
