"""What a text must be like to become part of a path: the one place that whatever comes from a file must pass."""

from __future__ import annotations

import re

_NAME = re.compile(r"[^\x00-\x1f\x7f/\\:*?\"<>|.~ -][^\x00-\x1f\x7f/\\:*?\"<>|]{0,99}")


def is_file_name(text: object) -> bool:
    """Whether a text names something in one folder, on any system: neither another folder, nor a hidden or odd file.

    Args:
        text: What a file, or a user, calls something.
    """
    return isinstance(text, str) and bool(_NAME.fullmatch(text)) and not text.endswith((".", " "))
