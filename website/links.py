"""Where links lead on the site: pages link to each other, and to files, by their places in the repository."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"(?<=\]\()([^)\s:#][^)\s:#]*)(?=[)#])")
_FENCE = re.compile(r"(^[ ]*```.*?^[ ]*```)", re.MULTILINE | re.DOTALL)


def other_pages() -> dict[str, str]:
    """Pages of the repository outside ``docs/``, and their places on the site, in small letters: README is an index."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("configs/**/*.md")]
    return {path.relative_to(ROOT).as_posix(): path.relative_to(ROOT).as_posix().lower() for path in sorted(found)}


def site_links(markdown: str, source: str, page: str, repository: str) -> str:
    """The page with its links as they are on the site.

    Args:
        markdown: The page.
        source: Its path in the repository.
        page: Its path on the site.
        repository: Where files that have no page are looked at.
    """
    moved = other_pages()

    def target(link: str) -> str:
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), link))
        place = moved.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if place is None:
            kind = "tree" if (ROOT / path).is_dir() else "blob"
            return f"{repository}/{kind}/main/{path}" if (ROOT / path).exists() else link
        return os.path.relpath(place, posixpath.dirname(page) or ".").replace(os.sep, "/")

    return _outside_code(markdown, lambda text: _LINK.sub(lambda found: target(found[1]), text))


def _outside_code(markdown: str, change: Callable[[str], str]) -> str:
    parts = _FENCE.split(markdown)
    return "".join(part if part.lstrip().startswith("```") else change(part) for part in parts)
