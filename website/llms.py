"""The site as two files for language models: ``llms.txt`` lists its pages, ``llms-full.txt`` holds them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

_NAME = re.compile(r"^::: (\S+)\n(?: +\S.*\n)*", re.MULTILINE)  # where the site has a name's reference
_FRONT = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)


class Told(NamedTuple):
    """A page: the part of the navigation that it is in, its title, its address on the site and its Markdown."""

    part: str
    title: str
    url: str
    markdown: str


def llms(name: str, about: str, pages: Sequence[Told]) -> str:
    """Every page by its title and address, in the order of the navigation; the format is that of llmstxt.org."""
    lines, part = [f"# {name}", "", f"> {about}"], None
    for page in pages:
        if page.part != part:
            part = page.part
            lines += ["", f"## {part}", ""]
        lines.append(f"- [{page.title}]({page.url})")
    return "\n".join(lines) + "\n"


def llms_full(name: str, about: str, pages: Sequence[Told]) -> str:
    """Every page's text; a name of the reference as its signature and its docstring."""
    texts = [f"# {name}\n\n> {about}", *(f"<!-- {page.url} -->\n\n{_whole(page.markdown)}" for page in pages)]
    return "\n\n".join(texts) + "\n"


def _whole(markdown: str) -> str:
    return _NAME.sub(lambda found: _docstring(found[1]), _FRONT.sub("", markdown) + "\n").strip()


def _docstring(path: str) -> str:
    module, _, name = path.rpartition(".")
    thing = getattr(import_module(module), name)
    signature = inspect.signature(thing) if inspect.isclass(thing) or inspect.isfunction(thing) else ""
    return f"## {path}\n\n`{name}{signature}`\n\n{inspect.getdoc(thing) or ''}\n"
