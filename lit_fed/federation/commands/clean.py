"""``lit-fed clean``: list the folders of runs that a node holds, and remove some."""

from __future__ import annotations

import shutil
from datetime import datetime
from pathlib import Path

from jsonargparse import ArgumentParser

from lit_fed.command.command import Call
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.federation.ends import sole_user
from lit_fed.federation.node.kept import NAME, RUN_ID, read


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--state_dir", type=str, required=True, help="folder that the node was started with")
    parser.add_argument(
        "--remove",
        nargs="+",
        action="extend",
        default=[],
        metavar="RUN",
        help="remove the clients' states of these runs",
    )


def run(call: Call) -> int:
    """Print a line per run; nothing but folders of runs is removed, because the rest keeps promises beyond a run."""
    home, remove = Path(call.settings.state_dir), call.settings.remove
    folder = home / "states"
    if not folder.is_dir():
        raise ConfigError(f"--state_dir {home} has no folder states; give the folder that the node was started with")
    with sole_user(home, "--state_dir"):
        runs = {path.name: path for path in sorted(folder.iterdir()) if RUN_ID.fullmatch(path.name) and _is_real(path)}
        last = _last(folder) if runs else ""
        for name in remove:
            if name not in runs:
                raise ConfigError(f"--remove {name} is not a run in {folder}; leave --remove out to list the runs")
            if name == last:
                raise ConfigError(f"--remove {name} is the run whose end is in {folder / NAME}; remove that file first")
        for name, path in runs.items():
            stats = [file.stat() for file in (path, *path.rglob("*"))]
            changed = datetime.fromtimestamp(max(stat.st_mtime for stat in stats))
            size = sum(stat.st_size for stat in stats) / 1e6
            if name in remove:
                shutil.rmtree(path)
            what = "removed" if name in remove else "its end is saved for predictions" * (name == last)
            print(f"{name}  {size:12,.1f} MB  {changed:%Y-%m-%d %H:%M}  {what}".rstrip())
    return 0


def _is_real(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _last(folder: Path) -> str:
    """Return the run whose end the node saved; empty without one."""
    if not (folder / NAME).exists():
        return ""
    try:
        return read(folder).run_id
    except CheckpointError as error:
        raise ConfigError(f"{error}; remove it, or restore it") from error
