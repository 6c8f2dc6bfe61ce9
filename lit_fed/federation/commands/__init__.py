"""Commands of a federation over machines."""
