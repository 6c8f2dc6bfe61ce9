"""What Flower runs in processes of its own: it hands messages on, and imports nothing of this package."""
