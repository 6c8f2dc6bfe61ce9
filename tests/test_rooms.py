"""The house: what lies where, under which names, and what of others' code that promises nothing it stands on."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from runpy import run_path

import pytest
import torch
from lightning import LightningModule
from torch.autograd import Variable
from torch.nn.modules import batchnorm
from torch.optim import SGD
from torch.optim import optimizer as torch_optimizer
from torch.utils import _pytree
from torchmetrics import MeanMetric, MetricCollection

from tests.support import ROOT

PACKAGE = ROOT / "lit_fed"
SOURCES = sorted(PACKAGE.rglob("*.py"))
FACES = ("algorithm", "callbacks", "codecs", "losses", "methods", "networks", "participation", "poses", "protocols")
WINGS = ("federation", "poses", "studies")


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
    "lit_fed/*.py": 1_590,
    "lit_fed/callbacks": 1_470,
    "lit_fed/command": 1_780,
    "lit_fed/data": 6_480,
    "lit_fed/engine": 9_050,
    "lit_fed/federation": 6_460,
    "lit_fed/handover": 450,
    "lit_fed/losses": 100,
    "lit_fed/methods": 4_030,
    "lit_fed/networks": 1_150,
    "lit_fed/participation": 710,
    "lit_fed/poses": 3_120,
    "lit_fed/privacy": 1_820,
    "lit_fed/robust": 770,
    "lit_fed/studies": 4_730,
    "lit_fed/tasks": 200,
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


# ---------------------------------------------------------------------- private names of others

PRIVATE = {
    torch: {
        "_foreach_add", "_foreach_add_", "_foreach_addcmul_", "_foreach_copy_", "_foreach_div", "_foreach_lerp_",
        "_foreach_mul", "_foreach_mul_", "_foreach_norm", "_foreach_sign", "_foreach_sqrt", "_foreach_sub",
        "_foreach_zero_", "_softmax_backward_data", "_C",
    },
    batchnorm: {"_BatchNorm"},
    torch._C: {"_autograd"},
    torch._C._autograd: {"_profiler_enabled"},
    _pytree: {"tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"},
    torch.utils: {"_python_dispatch"},
    Variable: {"_execution_engine"},
    torch_optimizer: {"_global_optimizer_post_hooks", "_global_optimizer_pre_hooks"},
    SGD([torch.zeros(1)]): {"_optimizer_step_post_hooks", "_optimizer_step_pre_hooks"},
    torch.nn.Module(): {"_buffers", "_modules", "_non_persistent_buffers_set", "_parameters"},
    torch.zeros(1): {"_base", "_version"},
    MeanMetric(): {"_computed", "_reductions", "_to_sync", "_update_count"},
    MetricCollection: {"_compute_groups_create_state_ref"},
    LightningModule(): {"_fabric", "_fabric_optimizers", "_trainer"},
}  # fmt: skip
"""What torch, torchmetrics and Lightning promise nobody, and this package uses; their versions are bounded for it."""
WRITTEN = {"_opt_called"}
"""What is only written for them, overridden, or made in a constructor."""
OTHERS = {  # of other packages, and
    *("_actions", "_StoreAction", "_common", "_exit", "_run_exitfuncs", "_get_file_writer"),
    "_completions_jsonschema",  # of jsonargparse: `lit-fed schema`
    "_pld",  # of dp-accounting too: one release's privacy losses, composed anew each round
    "_rdp",  # of dp-accounting, an extra: the numbers of tests/privacy/test_accounting.py need it
    *("_asdict", "_fields", "_make", "_replace"),  # of named tuples, which are documented
}


def private_names(path: Path) -> Iterator[str]:
    """The private names that a file takes of others: attributes that nothing in the package defines, and imports."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("lit_fed"):
            if node.module == "torch.utils._pytree":
                yield from (name.name for name in node.names)
            elif any(map(is_private, (node.module or "").split("."))):
                yield next(filter(is_private, (node.module or "").split(".")))
            yield from (name.name for name in node.names if is_private(name.name))


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(path: Path) -> Iterator[str]:
    """What a file makes: attributes of self, functions, classes, fields, names."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            yield from [node.attr] if node.value.id in ("self", "cls") else []


def test_each_private_name_that_is_used_is_there() -> None:
    missing = [
        (str(owner)[:40], name) for owner, names in PRIVATE.items() for name in names if not hasattr(owner, name)
    ]
    assert missing == []


def test_each_private_name_that_is_used_is_in_the_list() -> None:
    listed = {name for names in PRIVATE.values() for name in names} | WRITTEN | OTHERS
    own = {name for path in SOURCES for name in defined(path)}
    found = {name for path in SOURCES for name in private_names(path)} - own
    assert found <= listed, found - listed
    unused = {name for names in PRIVATE.values() for name in names} - {
        n for path in SOURCES for n in private_names(path)
    }
    assert unused - own == set()
