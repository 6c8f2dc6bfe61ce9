"""The configuration files that come with the package: where they are, what they are called, what they say they are."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from pathlib import Path

_FOLDER = "configs"


def shipped_folder() -> Path:
    """Where they lie: in the installed package, and in a copy of the repository beside it."""
    package = Path(__file__).parents[2]
    return package / _FOLDER if (package / _FOLDER).is_dir() else package.parent / _FOLDER


@cache
def shipped() -> dict[str, Path]:
    """All of them by name, such as ``method/fedprox.yaml``, folder by folder, those outside of any folder first."""
    folder = shipped_folder()
    names = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.yaml")}
    return dict(sorted(names.items(), key=lambda item: (item[0].count("/") > 0, item[0])))


def first_line(path: Path) -> str:
    """What a file says it is: its first line, a comment."""
    with open(path, encoding="utf-8") as file:
        return file.readline().strip().removeprefix("#").strip()


def name_of(path: str | Path) -> str:
    """What a shipped file is called by whoever names it from the repository's root."""
    return Path(path).as_posix().removeprefix("./").removeprefix(f"{_FOLDER}/")


def located(path: str | Path) -> str:
    """A configuration file as it can be opened: itself where it is there, else the shipped one of that name.

    Args:
        path: What a user, or a study, calls it; ``configs/method/fedprox.yaml`` is ``method/fedprox.yaml``.

    Returns:
        The path; as it was where there is no such file at all.
    """
    return str(path) if is_file(str(path)) else str(shipped().get(name_of(path), path))


def is_file(path: str) -> bool:
    """Whether a word names a file; a word that can be no name does not."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def close_name(path: str | Path) -> str:
    """The shipped file that was most likely meant by a path where there is none; empty where none was."""
    return next(iter(get_close_matches(name_of(path), shipped(), n=1, cutoff=0.8)), "")
