"""Settings for the property tests of the data package."""

from hypothesis import settings

# Shared machines stall now and then; a slow example is no failure.
settings.register_profile("data", deadline=None)
settings.load_profile("data")
