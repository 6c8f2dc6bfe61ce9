"""Imports all modules that cells need, in the process that forks them; see `lit_fed.studies.cell_process`."""

import atexit
import gc
import importlib
import os

for _name in (
    *("lit_fed.__main__", "lit_fed.callbacks", "lit_fed.data", "lit_fed.methods", "lit_fed.studies.cell_process"),
    *("matplotlib.backends.backend_agg", "sklearn.datasets", "torch.utils.tensorboard"),
):
    importlib.import_module(_name)
# The forking process needs no clean-up, and some libraries complain during it.
atexit.register(os._exit, 0)
gc.collect()
gc.freeze()  # a cell's GC then neither scans nor copies existing objects
