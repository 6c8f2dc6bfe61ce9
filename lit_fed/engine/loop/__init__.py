"""The rounds: put together, run, recorded, resumed."""
