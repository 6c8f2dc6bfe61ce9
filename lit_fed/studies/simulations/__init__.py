"""Simulations of papers whose task is no data set."""
