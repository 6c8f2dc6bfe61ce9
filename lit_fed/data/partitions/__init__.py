"""How samples are cut into clients."""
