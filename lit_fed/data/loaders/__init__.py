"""Batches: loaders, workers, transforms, images from files."""
