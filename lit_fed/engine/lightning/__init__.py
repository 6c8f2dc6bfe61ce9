"""What Lightning offers a module, where a federation trains it."""
