"""Error messages about settings that cannot be read."""
