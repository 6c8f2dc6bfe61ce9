"""Counts of the slips that CONTRIBUTING's guide names, by room: ``python -m tests.plain_english [PATTERN]``.

With the name of a pattern, every place where it occurs is printed, too.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "lit_fed"

PATTERNS = {
    # "What a node holds": a noun or an imperative comes first; "Whether …" is English for a predicate
    "what-summary": r"\A(?:What|That|Those|Who|How|Where|When|Of|Which)\b",
    # "is no key", "is none"; "there is no" and "is no longer" are English
    "is-no": r"(?<!here )(?<!it )\b(?:is|are|was|were|be) (?:no|none)\b(?! (?:longer|more|less|larger|smaller)\b)",
    # "has not its data"
    "has-not": r"\b(?:has|have|had) not (?:its|the|a|an|any|their|all)\b",
    # "comes out otherwise"; "; otherwise it fails", "would otherwise" and "or otherwise" are English
    "otherwise": r"(?<![;,.:(] )(?<![;,.:(])(?<!would )(?<!or )(?<!\A)\botherwise\b",
    # "those that", "them of", "that of": a pronoun for a noun
    "pronoun": r"\b(?:those|them|these) (?:of|that|which|who|whose|whom|for|with|in|on|at|from)\b|\bits own\b(?! \w)",
    # "what is kept", "all that is", "that which"
    "what-is": r"\b(?:what|all that) (?:is|are|was|were|it|they|has|have|a|the)\b|\bthat which\b",
    # "so many rounds" for a number
    "so-many": r"\b(?:so|as) (?:many|much|long|few)\b(?! as\b)",
    # "nothing is kept of it", "of which none may"
    "inverted": r"\bof (?:which|whom) (?:none|nothing|no|each|all)\b|\b(?:nor|neither|never) (?:is|are|does|do|has)\b",
    # "key: must be ...", "key: use ..." in an error: one punctuation, ";"
    "error-colon": r": (?:it|they|use|set|give|must|name|choose|only|one of|expected|there|no|not)\b",
}
"""Regular expressions by name, each with an example; `error-colon` is looked for in errors only."""

MARKS = {
    "math": r":math:|\$\$|\.\. math::",
    "citation": r"arXiv|\bdoi\b|et al\.|\b(?:19[5-9]\d|20[0-3]\d)\b(?!-\d\d-)",  # a paper's year
    "note": r"^\s*Notes?:",
}
"""What a shorter docstring must not lose."""


class Text(NamedTuple):
    """A docstring, a comment or an error's text, with its place."""

    kind: str
    path: Path
    line: int
    text: str


def room_of(path: Path) -> str:
    """The room of a file: its folder, two deep where a room has rooms."""
    parts = path.relative_to(PACKAGE).parts
    deep = 2 if parts[0] in ("engine", "data", "command") and len(parts) > 2 else 1
    return "/".join(parts[:deep]) if len(parts) > 1 else "beside the rooms"


def texts(path: Path) -> Iterator[Text]:
    """The docstrings, comments and errors of a file; of successive lines of a comment, one text."""
    source = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):  # attributes' docstrings, too
                yield Text("docstring", path, node.lineno, text)
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if re.search(r"(?i)error\Z|warn", name):
                for argument in node.args[:1]:
                    if text := _literal(argument):
                        yield Text("error", path, node.lineno, text)
    last = 0
    block: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or token.string.startswith(("# fmt", "# noqa", "# type", "#!", "# ----")):
            continue
        if token.start[0] != last + 1 and block:
            yield Text("comment", path, last, " ".join(block))
            block = []
        block.append(token.string.lstrip("# "))
        last = token.start[0]
    if block:
        yield Text("comment", path, last, " ".join(block))


def _literal(node: ast.AST) -> str:
    """The literal part of an error's text, with ``{}`` for what is put in."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(_literal(value) or "{}" for value in values)
        case ast.BinOp(left=left, right=right):
            return _literal(left) + _literal(right)
        case _:
            return ""


def found(text: Text) -> Iterator[str]:
    """The patterns that occur in a text, each as often as it does."""
    flat = " ".join(re.sub(r"``[^`]*``|`[^`]*`", "x", text.text).split())
    for name, pattern in PATTERNS.items():
        if name == "what-summary" and text.kind != "docstring":
            continue
        if name == "error-colon" and text.kind != "error":
            continue
        for _ in re.finditer(pattern, flat, re.IGNORECASE if name != "what-summary" else 0):
            yield name


def counts() -> dict[str, Counter[str]]:
    """The slips of every room, by pattern."""
    counted: dict[str, Counter[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        counter = counted.setdefault(room_of(path), Counter())
        for text in texts(path):
            counter.update(found(text))
    return counted


def marks() -> dict[str, Counter[str]]:
    """The equations, citations and notes of every room's docstrings and comments."""
    counted: dict[str, Counter[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        counter = counted.setdefault(room_of(path), Counter())
        for text in texts(path):
            for name, pattern in MARKS.items():
                counter[name] += len(re.findall(pattern, text.text, re.MULTILINE))
    return counted


def table(counted: dict[str, Counter[str]], names: list[str]) -> str:
    """Counts as a table in Markdown, a line a room."""
    lines = [" | ".join(["room", *names]), "|".join(["---"] * (len(names) + 1))]
    lines += [" | ".join([room, *(str(counter[name]) for name in names)]) for room, counter in counted.items()]
    total = sum(counted.values(), Counter[str]())
    return "\n".join([*lines, " | ".join(["all", *(str(total[name]) for name in names)])])


def main(arguments: list[str]) -> None:
    """Print the counts, and the places of the patterns that are named."""
    print(table(counts(), list(PATTERNS)))
    print()
    print(table(marks(), list(MARKS)))
    for path in sorted(PACKAGE.rglob("*.py")) if arguments else []:
        for text in texts(path):
            if set(arguments) & set(found(text)):
                place = f"{text.path.relative_to(PACKAGE.parent)}:{text.line}"
                print(f"{place} [{text.kind}] {' '.join(text.text.split())[:300]}")


if __name__ == "__main__":
    main(sys.argv[1:])
