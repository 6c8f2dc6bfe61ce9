"""Bad inputs, drawn over all options and all files: ``python -m tests.bad_inputs --seed 1 --cases 500``."""
