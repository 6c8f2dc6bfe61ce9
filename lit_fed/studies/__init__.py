"""Studies: a grid of ordinary runs, its table beside the paper's, and the paper's claims checked over seeds."""
