"""The rounds: assembled, run, recorded, resumed."""
