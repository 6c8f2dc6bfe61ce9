"""`benchmarks/lines.py` counts what stands in a file, by room."""

from collections import Counter
from pathlib import Path

from benchmarks import lines

# Code: 3, 4, 7, 8, 11 to 13; docstrings: 1, 2, 5, 9 and 10; imports: 3 and 4. Line 8 is a text and no docstring.
SOURCE = '''"""A module
of two lines."""
from os import (  # a comment
    path)
"""What path is."""

class Some:
    name = "a text"
    """Its name,
    on two lines."""
    def method(self):
        return (path,
                self)
    # nothing more
'''


def test_lines_are_of_code_docstrings_and_imports() -> None:
    assert lines.count(SOURCE) == {"files": 1, "code": 7, "docs": 5, "imports": 2}


def test_a_file_counts_for_its_room_and_the_whole() -> None:
    files = {
        "lit_fed/a.py": "1",
        "lit_fed/engine/loop/b.py": "1\n2",
        "website/c.py": "1",
        "notes/d.py": "1",
        "lit_fed/e": "",
    }
    sums = lines.table((Path(name), source) for name, source in files.items())
    assert {room: (counted["files"], counted["code"]) for room, counted in sums.items()} == {
        "lit_fed": (2, 3),
        "lit_fed/*.py": (1, 1),
        "lit_fed/engine": (1, 2),
        "website": (1, 1),
    }
    assert lines.cells(Counter(files=2, code=1000, docs=3, imports=125)) == "2 | 1,000 | 3 | 12.5 %"


def test_a_commit_and_the_tree_stand_side_by_side(monkeypatch, capsys) -> None:
    monkeypatch.setattr(lines, "ROOMS", ("website",))  # a small room
    lines.main("HEAD")
    head, _, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("| room | HEAD: files | ")
    assert any(row.startswith("| `website/*.py` | ") and row.count("|") == 10 for row in rows)
