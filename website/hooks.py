"""What MkDocs calls while it builds the site (``hooks`` of mkdocs.yml)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent.parent))  # `website` is no installed package

from website.links import ROOT, other_pages, site_links
from website.llms import Told, llms, text_of
from website.mathml import Equations
from website.pages import generated_pages
from website.verdicts import with_verdicts

_SOURCES: dict[str, str] = {}  # by its place on the site, the path in the repository that a page's links start from
_TOLD: dict[str, str] = {}  # by the same place, the page's Markdown
_PAGES: list[Any] = []  # in the order of the navigation


def on_config(config: Any) -> Any:
    """Let every page and docstring have equations, and the navigation all pages of the folders that it names."""
    config.markdown_extensions.append(Equations())
    docs = ROOT / "docs"
    pages = {*generated_pages(), *(path.relative_to(docs).as_posix() for path in docs.rglob("*.md"))}
    config.nav = _with_pages(config.nav, sorted(pages, key=str.lower))
    return config


def _with_pages(entries: list[Any], pages: list[str]) -> list[Any]:
    """A part of the navigation in which ``folder/`` stands for the pages in it."""
    found: list[Any] = []
    for entry in entries:
        if isinstance(entry, dict):
            below = {
                title: _with_pages(part, pages) if isinstance(part, list) else part for title, part in entry.items()
            }
            found.append(below)
        else:
            found += [page for page in pages if page.startswith(entry)] if entry.endswith("/") else [entry]
    return found


def on_files(files: Any, config: Any) -> Any:
    """Add what stands outside ``docs/``, and what is generated."""
    for source, page in other_pages().items():
        _SOURCES[page] = source
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for page, markdown in generated_pages().items():
        files.append(File.generated(config, page, content=markdown))
    return files


def on_nav(nav: Any, **_: Any) -> None:
    """Keep the order of the pages."""
    _PAGES[:] = nav.pages


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Turn links within the repository into links within the site."""
    place = page.file.src_uri
    if 'class="beside"' in markdown:
        page.meta["hide"] = ["toc"]  # two programs beside each other need its room
    if '<div class="claims"' in markdown:
        page.meta["hide"] = ["navigation", "toc"]  # its table needs the whole width
    if place == "index.md":
        page.meta["hide"] = ["navigation", "toc"]
    source = _SOURCES.get(place, f"docs/{place}")
    _TOLD[place] = site_links(markdown, source, place, config.repo_url.rstrip("/"))
    return _TOLD[place]


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Give verdicts their colours, and the tables of claims a filter and the page's whole width."""
    return with_verdicts(html)


def on_post_build(config: Any) -> None:
    """Write `llms.txt`, and beside each page its text, for language models."""
    pages = [
        Told(
            page.ancestors[-1].title if page.ancestors else "Home", str(page.title), page.url, _TOLD[page.file.src_uri]
        )
        for page in _PAGES
    ]
    site = Path(config.site_dir)
    (site / "llms.txt").write_text(llms(config.site_name, config.site_description, pages), encoding="utf-8")
    for page in pages:
        (site / f"{page.url}.md").write_text(text_of(page), encoding="utf-8")
