"""The provenance of results: a commit of this history, without which nothing is entered."""

from __future__ import annotations

import re
from subprocess import SubprocessError

from lit_fed.errors import ConfigError
from lit_fed.studies.environment import git

_HASH = re.compile(r"[0-9a-f]{7,40}")


def check_commits(setting: str, commits: str) -> None:
    """Refuse results that were not made with commits of the working directory's history.

    In a shallow clone, which lacks the history, every hash counts as a commit.

    Args:
        setting: The study and its profile, which errors name.
        commits: The recorded commits, separated by `` + ``.

    Raises:
        ConfigError: If the code had uncommitted changes or was outside a repository, or a commit is not an ancestor of
            the checked-out one.
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
