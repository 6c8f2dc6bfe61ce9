"""Settings for all tests."""

import torch

torch.set_num_threads(1)  # sums are then the same on every machine
