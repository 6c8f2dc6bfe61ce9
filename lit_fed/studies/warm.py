"""Imports all that cells need, for the process from which they are forked; see `lit_fed.studies.cell_process`."""

import atexit
import gc
import importlib
import os

for _name in (
    *("lit_fed.__main__", "lit_fed.callbacks", "lit_fed.data", "lit_fed.methods", "lit_fed.studies.cell_process"),
    *("matplotlib.backends.backend_agg", "sklearn.datasets", "torch.utils.tensorboard"),
):
    importlib.import_module(_name)
# The process from which cells are forked has nothing to put away, and some libraries complain when they are.
atexit.register(os._exit, 0)
gc.collect()
gc.freeze()  # a cell then neither searches nor copies what is there already
