"""Cells as runs: where they run, in which environment, and what is shown meanwhile."""
