"""Simulations of papers' figures that need no data set."""
