"""Flower's PyTorch quickstart on the digits, as its own template has it: nothing of ours is imported."""
