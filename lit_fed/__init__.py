"""Federated learning for PyTorch Lightning.

Names are in `lit_fed.api`, which takes seconds to import and so waits for the first use: the command line responds at
once, and Ctrl-C ends it at any moment.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_fed.api import *  # noqa: F403

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name != "__all__" and name.startswith("__"):
        raise AttributeError(f"module 'lit_fed' has no attribute {name!r}")
    api = import_module("lit_fed.api")
    return globals()[name] if name in globals() else getattr(api, name)  # rooms that it imports are here now


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module("lit_fed.api").__all__})
