"""One-line remarks about data, such as files left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from lightning.fabric.utilities.rank_zero import rank_zero_only

_MOST_ENDINGS = 5


@rank_zero_only
def remark(line: str) -> None:
    """Print a line, in the first process only."""
    print(line.encode("utf-8", "backslashreplace").decode())  # file names may not be UTF-8


def remark_left_out(root: Path, files: Sequence[Path], num_read: int, wanted: Sequence[str]) -> None:
    """Count the unread files of a folder by their endings and name one; silent without such files."""
    if not files:
        return
    endings = Counter(file.suffix.lower() or "without ending" for file in files).most_common()
    counts = ", ".join(f"{count} {ending}" for ending, count in endings[:_MOST_ENDINGS])
    more = ", …" if len(endings) > _MOST_ENDINGS else ""
    first = files[0].relative_to(root)
    remark(
        f"left out {len(files)} of {len(files) + num_read} files in {root}: {counts}{more}, such as {first}; "
        f"{', '.join(wanted)} are read where they belong"
    )


def is_hidden(path: Path) -> bool:
    """Whether a file or folder is hidden, such as ``.DS_Store``."""
    return path.name.startswith(".")
