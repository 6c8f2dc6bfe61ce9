"""Settings for all tests."""

import torch
from hypothesis import settings

torch.set_num_threads(1)  # sums are then the same on every machine
settings.register_profile("any machine", deadline=None)  # a busy one takes longer than the 200 ms that are usual
settings.load_profile("any machine")
