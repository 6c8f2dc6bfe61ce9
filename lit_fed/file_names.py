"""Names of files: a check of texts that become part of a path, and the short form of a path."""

from __future__ import annotations

import re
from pathlib import Path

_NAME = re.compile(r"[^\x00-\x1f\x7f/\\:*?\"<>|.~ -][^\x00-\x1f\x7f/\\:*?\"<>|]{0,99}")


def is_file_name(text: object) -> bool:
    """Whether a text from a file or a user names a file in one folder, on every system.

    Paths to other folders, hidden files and reserved characters do not.
    """
    return isinstance(text, str) and bool(_NAME.fullmatch(text)) and not text.endswith((".", " "))


def shown(path: str | Path) -> str:
    """A path as it can be typed here: relative where it lies below the working directory."""
    path, here = Path(path), Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
