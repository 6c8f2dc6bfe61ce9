"""The record's commands."""
