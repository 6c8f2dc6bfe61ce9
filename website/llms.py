"""The site for language models: ``llms.txt``, a line for each page, and beside each page its text as Markdown."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

_NAME = re.compile(r"^::: (\S+)\n(?: +\S.*\n)*", re.MULTILINE)  # where the site has a name's reference
_FRONT = re.compile(r"\A---\n.*?\n---\n", re.DOTALL)
_NO_PROSE = re.compile(r"^```.*?^```|^`[^`\n]*`$|^<!--.*?-->", re.MULTILINE | re.DOTALL)  # code, signatures, comments
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


class Told(NamedTuple):
    """A page: the part of the navigation that it is in, its title, its address on the site and its Markdown."""

    part: str
    title: str
    url: str
    markdown: str


def llms(name: str, about: str, pages: Sequence[Told]) -> str:
    """Return the list of pages in the order of the navigation; the format is that of llmstxt.org."""
    lines, part = [f"# {name}", "", f"> {about}"], None
    for page in pages:
        if page.part != part:
            part = page.part
            lines += ["", f"## {part}", ""]
        lines.append(f"- [{page.title}]({page.url}.md): {_about(page)}".removesuffix(": "))
    return "\n".join(lines) + "\n"


def text_of(page: Told) -> str:
    """Return a page's Markdown, with a name of the reference as its signature and its docstring."""
    return _NAME.sub(lambda found: _docstring(found[1]), _FRONT.sub("", page.markdown) + "\n").strip() + "\n"


def _about(page: Told) -> str:
    """Return the first sentence of a page's prose."""
    paragraphs = re.split(r"\n\s*\n", _NO_PROSE.sub("", text_of(page)))
    prose = [found[1] for part in paragraphs if (found := re.match(r"\s*(?:- )?([\w`\[\"*].*)", part, re.DOTALL))]
    words = " ".join(_LINK.sub(r"\1", prose[0]).replace(":math:", "").split()) if prose else ""
    return re.split(r"(?<=[.:;])\s(?!\d)", words)[0].rstrip(".:;").replace("**", "")


def _docstring(path: str) -> str:
    module, _, name = path.rpartition(".")
    thing = getattr(import_module(module), name)
    signature = inspect.signature(thing) if inspect.isclass(thing) or inspect.isfunction(thing) else ""
    return f"## {path}\n\n`{name}{signature}`\n\n{inspect.getdoc(thing) or ''}\n"
