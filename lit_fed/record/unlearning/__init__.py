"""Approximate unlearning: what a run keeps for it, and a method per file."""
