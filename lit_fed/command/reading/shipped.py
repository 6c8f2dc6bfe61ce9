"""Configuration files of the package: their folder, their names, their first lines."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from pathlib import Path

_FOLDER, _EXAMPLES = "configs", "examples"


def shipped_folder(name: str = _FOLDER) -> Path:
    """Folder of the files: inside the installed package, or beside it in a clone of the repository."""
    package = Path(__file__).parents[2]
    return package / name if (package / name).is_dir() else package.parent / name


@cache
def shipped() -> dict[str, Path]:
    """Paths by name, such as ``method/fedprox.yaml``; top-level files first, then folder by folder."""
    folder = shipped_folder()
    names = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*.yaml")}
    return dict(sorted(names.items(), key=lambda item: (item[0].count("/") > 0, item[0])))


def examples(name: str) -> dict[str, Path]:
    """Files of an example by their names, ``examples/my_data.py`` and so on: with one stem, or in one folder."""
    folder = shipped_folder(_EXAMPLES)
    kinds = (".py", ".yaml", ".toml", ".ipynb", ".md")
    files = {path.relative_to(folder.parent): path for path in sorted(folder.rglob("*")) if path.suffix in kinds}
    wanted = Path(name)
    return {
        relative.as_posix(): path
        for relative, path in files.items()
        if wanted in relative.parents[:-1] or relative.with_suffix("") == wanted.with_suffix("")
    }


def first_line(path: Path) -> str:
    """First line of a file, a comment that describes it."""
    with open(path, encoding="utf-8") as file:
        return file.readline().strip().removeprefix("#").strip()


def name_of(path: str | Path) -> str:
    """Name of a shipped file from its path relative to the repository's root."""
    return Path(path).as_posix().removeprefix("./").removeprefix(f"{_FOLDER}/")


def located(path: str | Path) -> str:
    """Path of a configuration file: the file itself if it exists, else the shipped file of that name.

    Args:
        path: Path or name; ``configs/method/fedprox.yaml`` is ``method/fedprox.yaml``.

    Returns:
        The path; unchanged if there is no such file.
    """
    return str(path) if is_file(str(path)) else str(shipped().get(name_of(path), path))


def is_file(path: str) -> bool:
    """Whether a file has this path; False for a text that cannot be a path."""
    try:
        return Path(path).is_file()
    except (OSError, ValueError):
        return False


def close_name(path: str | Path) -> str:
    """Name of the shipped file that is most similar to a path; empty if none is similar."""
    return next(iter(get_close_matches(name_of(path), shipped(), n=1, cutoff=0.8)), "")
