"""The population: clients, shared sets, views, and their metadata."""
