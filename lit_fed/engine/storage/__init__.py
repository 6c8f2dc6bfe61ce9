"""Clients' states between rounds, and files that are written whole."""
