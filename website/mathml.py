"""Equations of docstrings as MathML, which browsers show by themselves: no script, nothing fetched."""

from __future__ import annotations

import re
from typing import Any
from xml.etree.ElementTree import Element, fromstring, tostring

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor

_BLOCK = re.compile(r"^\.\. math::[ ](.+?)(?=\n[ ]*\n|\Z)", re.MULTILINE | re.DOTALL)
_MATHML = "http://www.w3.org/1998/Math/MathML"
_BARS = ("\u2015", "\u00af", "\u203e")
_INDEX = r"(?<![\w`])([^\W\d_])_(\w)(?!\w)"  # w_g in a text, which is no name of code
_NAME = r"`(lit_fed(?:\.\w+)+)`"


def mathml(latex: str, display: str = "inline") -> str:
    """An equation as an element that browsers know.

    Args:
        latex: The equation.
        display: ``inline`` or ``block``.

    Raises:
        ValueError: If a command in it is not known, which would stand in the page as it was written.
    """
    made: str = convert(" ".join(latex.split()), display=display)
    if unknown := re.search(r"\\[A-Za-z]+", made):
        raise ValueError(f"no MathML for {unknown[0]} in {latex!r}")
    root = fromstring(made.replace(f' xmlns="{_MATHML}"', ""))  # HTML knows the element without
    for over in [one for one in root.iter() if one.tag == "mover" and one[1].text in _BARS]:
        over.remove(over[1])  # a bar is as long as what it is over only with a font for mathematics, a border always
        over.tag, over.attrib = "mrow", {"class": "overline"}
    return tostring(root, encoding="unicode")


class Equations(Extension):
    """``:math:`…``` in text, ``.. math::`` blocks, indices such as ``w_g``, links from ```lit_fed.data.Digits```."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 (Markdown's name)
        """Come before code, whose backticks they would be."""
        md.preprocessors.register(_Blocks(md), "equations", 40)
        md.inlinePatterns.register(_Inline(r":math:`([^`]+)`", md), "equation", 200)
        md.inlinePatterns.register(_Reference(_NAME, md), "reference", 195)
        md.inlinePatterns.register(_Index(_INDEX, md), "index", 175)


class _Blocks(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        text = _BLOCK.sub(lambda found: self.md.htmlStash.store(mathml(found[1], "block")), "\n".join(lines))
        return text.split("\n")


class _Inline(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[Any, int, int]:  # noqa: N802
        return self.md.htmlStash.store(mathml(m[1])), m.start(0), m.end(0)


class _Index(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[Any, int, int]:  # noqa: N802
        """A symbol with its index as a subscript."""
        symbol, index = Element("span"), Element("sub")
        symbol.text, index.text = m[1], m[2]
        symbol.append(index)
        return symbol, m.start(0), m.end(0)


class _Reference(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[Any, int, int]:  # noqa: N802
        """A link where the name has a place in the reference, else the name alone."""
        link = Element("autoref", {"identifier": m[1], "optional": ""})
        code = Element("code")
        code.text = m[1]
        link.append(code)
        return link, m.start(0), m.end(0)
