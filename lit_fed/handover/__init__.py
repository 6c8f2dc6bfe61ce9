"""Export of a trained network for use without lit_fed: weights, programs, model card."""
