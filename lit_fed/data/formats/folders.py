"""How a data set is written as one folder per client."""

from __future__ import annotations

from collections.abc import Callable
from functools import singledispatch
from pathlib import Path
from typing import Any, NamedTuple

from lit_fed.data.formats.archives import settings_of, write_folders


class FolderForm(NamedTuple):
    """How ``lit-fed split`` writes a kind of data as a folder for each client.

    Args:
        name: The data module that reads them.
        settings_of: Its settings.
        write: Writes the folders.
        holds: The data in a folder, for a reader.
        client: A client's name, by its position.
    """

    name: str
    settings_of: Callable[[Any], dict[str, Any]]
    write: Callable[[Any, Path], None]
    holds: str
    client: str


@singledispatch
def folder_form(data: object) -> FolderForm:
    """The form of a data module's folders: arrays, unless another is registered for its class."""
    return FolderForm("ClientArrays", settings_of, write_folders, "`data.npz` holds", "{}")
