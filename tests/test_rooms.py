"""The house: what lies where, and under which names."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from importlib import import_module
from pathlib import Path
from runpy import run_path

import pytest

from tests.support import ROOT

PACKAGE = ROOT / "lit_fed"
SOURCES = sorted(PACKAGE.rglob("*.py"))
FACES = ("algorithm", "callbacks", "codecs", "losses", "methods", "networks", "participation", "poses", "protocols")
WINGS = ("federation", "poses", "record", "studies")


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


# ---------------------------------------------------------------------- rooms


def is_of_a_module(test: Path) -> bool:
    """Whether a test is called after a module, or a package, at its place in the package; more words may follow."""
    room, words = PACKAGE / test.relative_to(ROOT / "tests").parent, test.stem.removeprefix("test_").split("_")
    names = ["_".join(words[:end]) for end in range(1, len(words) + 1)]
    return any((room / f"{name}.py").is_file() or (room / name).is_dir() for name in names)


def test_a_test_lies_where_its_module_does_or_says_that_it_crosses_rooms() -> None:
    """Tests beside no room, directly in tests/, are of the whole repository, or of a module beside the rooms."""
    tests = [path for path in (ROOT / "tests").rglob("test_*.py") if path.parent != ROOT / "tests"]
    assert len(tests) > 150
    lost = [path for path in tests if not path.stem.startswith("test_across_") and not is_of_a_module(path)]
    assert [path.relative_to(ROOT).as_posix() for path in lost] == []


@pytest.mark.parametrize("room", ["engine", "data", "command", *WINGS])
def test_few_files_lie_loose_in_a_room_of_rooms(room: str) -> None:
    assert len([path for path in (PACKAGE / room).glob("*.py") if path.name != "__init__.py"]) <= 8


def test_the_architecture_begins_with_all_rooms() -> None:
    told = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8").partition("```text\n")[2].partition("```")[0]
    named = set(re.findall(r"(\w+)/", told))
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    rooms |= {
        path.name
        for room in ("engine", "data", "command", *WINGS)
        for path in (PACKAGE / room).iterdir()
        if (path / "__init__.py").is_file()
    }
    assert rooms - {"__pycache__"} <= named | {"configs"}


def test_two_public_classes_have_two_names() -> None:
    where = defaultdict(list)
    for path in SOURCES:
        for node in tree(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(path.relative_to(ROOT).as_posix())
    assert {name: paths for name, paths in where.items() if len(paths) > 1} == {}


def test_a_protocol_is_an_evaluation() -> None:
    """What typing calls so is an interface here."""
    bare = [path for path in SOURCES for node in ast.walk(tree(path)) if takes_protocol_of_typing(node)]
    assert bare == []


def takes_protocol_of_typing(node: ast.AST) -> bool:
    names = node.names if isinstance(node, ast.ImportFrom) and node.module == "typing" else []
    return any(name.name == "Protocol" and name.asname != "Interface" for name in names)


# ---------------------------------------------------------------------- sizes

CODE_LINES = {
    "lit_fed/*.py": 1_710,
    "lit_fed/callbacks": 1_540,
    "lit_fed/codecs": 210,
    "lit_fed/command": 1_840,
    "lit_fed/data": 6_800,
    "lit_fed/engine": 9_870,
    "lit_fed/federation": 8_540,
    "lit_fed/handover": 450,
    "lit_fed/losses": 100,
    "lit_fed/methods": 4_620,
    "lit_fed/networks": 1_150,
    "lit_fed/participation": 710,
    "lit_fed/poses": 3_240,
    "lit_fed/privacy": 1_830,
    "lit_fed/record": 1_120,
    "lit_fed/robust": 770,
    "lit_fed/studies": 4_960,
    "lit_fed/tasks": 300,
}
"""The largest number of code lines of each room, as `benchmarks/lines.py` counts them."""
SLACK = 40  # lines below its number that a room may have


def test_a_room_grows_only_with_its_number() -> None:
    """A commit that raises a number names the ability that needs the lines; a room that shrinks lowers its number."""
    table = run_path(str(ROOT / "benchmarks" / "lines.py"))["table"]
    rooms = table((path.relative_to(ROOT), path.read_text(encoding="utf-8")) for path in SOURCES)
    code = {room: counts["code"] for room, counts in rooms.items() if room != "lit_fed"}
    assert code.keys() == CODE_LINES.keys(), "edit the rooms of CODE_LINES in tests/test_rooms.py"
    wrong = {room: lines for room, lines in code.items() if not 0 <= CODE_LINES[room] - lines <= SLACK}
    assert wrong == {}, (
        f"edit CODE_LINES in tests/test_rooms.py: {wrong}; name the ability in the commit that makes a room larger"
    )


# ---------------------------------------------------------------------- the public face


def test_what_users_read_names_no_room_of_the_engine() -> None:
    command = ["git", "grep", "-n", r"lit_fed\.engine", "--"]
    done = subprocess.run(
        [*command, "configs", "docs/*.md", "examples", "README.md", "lit_fed/methods"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode == 128:
        pytest.skip("this is no repository")
    assert done.stdout == ""


@pytest.mark.parametrize("face", FACES)
def test_a_public_class_says_that_it_lives_where_users_import_it(face: str) -> None:
    """Below the face, or at it: never in a room of the engine."""
    module = import_module(f"lit_fed.{face}")
    assert module.__all__
    for name in module.__all__:
        thing = getattr(module, name)
        if isinstance(thing, type) and thing.__module__.startswith("lit_fed."):
            assert not thing.__module__.startswith("lit_fed.engine."), name
            assert getattr(import_module(thing.__module__), thing.__qualname__) is thing, name
