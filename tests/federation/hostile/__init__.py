"""Attacks on a federation, each over what they would come by."""
