"""Readers of a user's own data: arrays, tables, texts, folders, other data modules."""
