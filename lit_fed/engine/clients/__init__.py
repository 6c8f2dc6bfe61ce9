"""One client at work, and a cohort one after the other."""
