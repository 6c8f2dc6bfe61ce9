"""What MkDocs calls while it builds the site (``hooks`` of mkdocs.yml)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent.parent))  # `website` is no installed package

from website.links import ROOT, other_pages, site_links
from website.mathml import Equations
from website.pages import generated_pages

_SOURCES: dict[str, str] = {}  # by its place on the site, the path in the repository that a page's links start from


def on_config(config: Any) -> Any:
    """Let every page and docstring have equations, and the navigation the pages of methods."""
    config.markdown_extensions.append(Equations())
    methods = sorted((path for path in generated_pages() if path.startswith("methods/")), key=str.lower)
    for section in config.nav:
        for entries in section.values():
            if isinstance(entries, list) and "methods/" in entries:
                entries.remove("methods/")
                entries += methods
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add what stands outside ``docs/``, and what is generated."""
    for source, page in other_pages().items():
        _SOURCES[page] = source
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for page, markdown in generated_pages().items():
        files.append(File.generated(config, page, content=markdown))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Turn links within the repository into links within the site."""
    place = page.file.src_uri
    if 'class="beside"' in markdown:
        page.meta["hide"] = ["toc"]  # two programs beside each other need its room
    source = _SOURCES.get(place, f"docs/{place}")
    return site_links(markdown, source, place, config.repo_url.rstrip("/"))
