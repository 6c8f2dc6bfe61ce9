"""A study's file: its rows, columns, cells, sweeps and claims, before anything runs."""
