"""Statistics of a federation's data before any training: by client and in all, exact or noisy."""
