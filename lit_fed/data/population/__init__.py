"""The population: clients, shared sets, views, and what is known of them."""
