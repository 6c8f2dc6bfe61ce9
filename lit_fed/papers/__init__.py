"""What knows a single paper: simulations, cost tables, figures; a folder a paper."""
