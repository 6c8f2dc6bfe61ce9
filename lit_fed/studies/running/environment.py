"""The environment of a study (versions, commit, hardware), and the provenance of results that are entered."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from subprocess import SubprocessError

from lit_fed.errors import ConfigError

_PACKAGES = ("lightning", "torch", "torchvision", "timm", "numpy", "jsonargparse")


def describe() -> dict[str, str]:
    """Return versions, commit and hardware by name."""
    from lit_fed import __version__

    versions = {"lit_fed": __version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "commit": commit(),
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
        "hardware": hardware(),
        "system": platform.platform(),
    }


def commit(folder: Path | None = None) -> str:
    """Return the checked-out commit of a folder, by default the working directory, and whether there are changes."""
    try:
        head = git("rev-parse", "HEAD", folder=folder)
        changed = git("status", "--porcelain", "--untracked-files=no", folder=folder)
    except (OSError, subprocess.SubprocessError):
        return "none: the working directory is not a git repository"
    return head[:12] + (" with uncommitted changes" if changed else "")


def git(*words: str, folder: Path | None = None) -> str:
    """Return git's answer in a folder, by default the working directory.

    Raises:
        OSError: Without git.
        subprocess.SubprocessError: If git reports an error or hangs.
    """
    done = subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True, timeout=10)
    return done.stdout.strip()


def hardware() -> str:
    """Return processor, cores, memory and GPUs in one line."""
    import torch

    parts = [f"{os.cpu_count()} cores", _processor()]
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        parts.append(f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB memory")
    count = torch.cuda.device_count()
    parts.append(", ".join(torch.cuda.get_device_name(index) for index in range(count)) if count else "no GPU")
    return ", ".join(part for part in parts if part)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


_HASH = re.compile(r"[0-9a-f]{7,40}")


def check_commits(setting: str, commits: str) -> None:
    """Refuse results that were not made with commits of the working directory's history.

    In a shallow clone, which lacks the history, every hash counts as a commit.

    Args:
        setting: The study and its profile, which errors name.
        commits: The recorded commits, separated by `` + ``.
    """
    for commit in commits.split(" + "):
        if not _HASH.fullmatch(commit):
            raise ConfigError(f"the commit of {setting} is {commit!r}; commit all changes, and run it again")
        try:
            if git("rev-parse", "--is-shallow-repository") != "true":
                git("merge-base", "--is-ancestor", commit, "HEAD")
        except (OSError, SubprocessError):
            raise ConfigError(
                f"the commit {commit} of {setting} is not in the history of this repository; merge it, or run it again"
            ) from None
