"""Imports all modules that cells need, and reads a command, in the process that forks cells.

See `lit_fed.studies.running.cell_process`.
"""

import atexit
import gc
import importlib
import os

from lit_fed.command.federated_cli import resolve
from lit_fed.command.reading.shipped import shipped
from lit_fed.command.roots import import_named

import_named()
for _name in (
    *(
        "lit_fed.__main__",
        "lit_fed.api",
        "lit_fed.command.cli",
        "lit_fed.command.federated_cli",
        "lit_fed.studies.running.cell_process",
    ),
    *("attrs", "matplotlib.backends.backend_agg", "sklearn.datasets", "torch.utils.tensorboard"),
    *("tensorboard.plugins.hparams.metadata", "torch.utils.serialization.config"),
):
    importlib.import_module(_name)
resolve(["fit", "-c", str(shipped()["quickstart.yaml"])])  # its parser, and the signatures of most of a cell's classes
# The forking process needs no clean-up, and some libraries complain during it.
atexit.register(os._exit, 0)
gc.collect()
gc.freeze()  # a cell's GC then neither scans nor copies existing objects
