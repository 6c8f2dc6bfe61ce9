"""Published data sets."""
