"""A trained network for those who do not have lit_fed: its weights, its program, and a card that says what it is."""
