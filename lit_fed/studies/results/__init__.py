"""Numbers of finished cells: means, tables, claims, and lines that are entered."""
