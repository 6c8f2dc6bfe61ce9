"""Runs a federation; knows no method and no task."""
