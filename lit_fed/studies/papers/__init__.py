"""Code for single papers: simulations, cost tables, figures; one folder per paper."""
