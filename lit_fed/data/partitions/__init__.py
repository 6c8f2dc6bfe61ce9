"""Partitions of samples into clients."""
