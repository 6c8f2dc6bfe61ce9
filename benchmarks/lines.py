"""Code lines, files and docstring lines by room, of a commit and of the working tree side by side.

A code line is a line with a token outside comments and docstrings. Usage: ``python benchmarks/lines.py [COMMIT]``;
without a commit only the working tree is counted.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = (
    "lit_fed",
    "tests",
    "benchmarks",
    "examples",
    "website",
)  # the first two by their rooms, too
SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def count(source: str) -> Counter[str]:
    """Return the code, docstring and import lines of a file; a bare string below an attribute is its docstring."""
    nodes = list(ast.walk(ast.parse(source)))
    docs = span(node for node in nodes if isinstance(node, ast.Expr) and is_text(node.value))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {line for one in tokens if one.type not in SILENT for line in range(one.start[0], one.end[0] + 1)} - docs
    imports = span(node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)))
    return Counter(files=1, code=len(code), docs=len(docs), imports=len(imports))


def is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def span(nodes: Iterator[ast.stmt]) -> set[int]:
    """The lines of statements."""
    return {line for node in nodes for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}


def rooms(path: Path) -> list[str]:
    """The rooms that a file counts for: ``lit_fed`` and ``lit_fed/engine`` for ``lit_fed/engine/loop/run.py``."""
    top = path.parts[0]
    return [top, "/".join(path.parts[:2]) if len(path.parts) > 2 else f"{top}/*.py"] if top in ROOMS[:2] else [top]


def table(files: Iterator[tuple[Path, str]]) -> dict[str, Counter[str]]:
    """Return the sums by room of files with their paths."""
    sums: dict[str, Counter[str]] = {}
    for path, source in files:
        if path.suffix == ".py" and path.parts[0] in ROOMS:
            counted = count(source)
            for room in rooms(path):
                sums.setdefault(room, Counter()).update(counted)
    return sums


def tree() -> Iterator[tuple[Path, str]]:
    """The tracked files of the working tree."""
    listed = subprocess.run(["git", "ls-files", "-z", *ROOMS], cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        if name.endswith(".py") and (ROOT / name).is_file():
            yield Path(name), (ROOT / name).read_text(encoding="utf-8")


def committed(commit: str) -> Iterator[tuple[Path, str]]:
    """The Python files of a commit."""
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive:
            if member.name.endswith(".py") and (file := archive.extractfile(member)) is not None:
                yield Path(member.name), file.read().decode()


def cells(counted: Counter[str]) -> str:
    """One tree's cells: files, code lines, docstring lines, and the share of imports in the code."""
    share = 100 * counted["imports"] / max(counted["code"], 1)
    return f"{counted['files']:,} | {counted['code']:,} | {counted['docs']:,} | {share:.1f} %"


def main(commit: str | None = None) -> None:
    trees = {commit: table(committed(commit))} if commit else {}
    trees["now"] = table(tree())
    print("| room |" + "".join(f" {name}: files | code | docstrings | imports |" for name in trees))
    print("|---|" + "---:|" * 4 * len(trees))
    for room in sorted({room for sums in trees.values() for room in sums}):
        print(f"| `{room}` |" + "".join(f" {cells(sums.get(room, Counter()))} |" for sums in trees.values()))


if __name__ == "__main__":
    main(*sys.argv[1:])
