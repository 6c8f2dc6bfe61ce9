"""Private names of torch, torchmetrics and Lightning: in one file, on one page, and what runs without each."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

from lit_fed import private_names
from tests.support import ROOT

PACKAGE = ROOT / "lit_fed"
SOURCES = sorted(PACKAGE.rglob("*.py"))
LOOKED_UP = PACKAGE / "private_names.py"
IN_GROUPS_OF_EQUAL_BATCHES = {"TorchDispatchMode"}
"""Without these, groups take batches by size, and results differ by rounding."""
ALONE = {"_update_count", "_compute_groups_create_state_ref"}
"""Without these, clients of a task with metrics train one after the other."""

WRITTEN = {"_opt_called", "_to_sync"}
"""What is only written, beside a public way."""
OTHERS = {  # of other packages, and
    *("_actions", "_exit", "_run_exitfuncs", "_get_file_writer"),
    "_pld",  # of dp-accounting too: one release's privacy losses, composed anew each round
    "_rdp",  # of dp-accounting, an extra: the numbers of tests/privacy/test_accounting.py need it
    *("_asdict", "_fields", "_make", "_replace"),  # of named tuples, which are documented
}


def private_names_of(path: Path) -> Iterator[str]:
    """The private names that a file takes of others: attributes that nothing in the package defines, and imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            yield from [node.attr] if node.value.id in ("self", "cls") else []


# ---------------------------------------------------------------------- one file, one page


def rows(header: str) -> list[set[str]]:
    """The names in each row's first column of a table of the page."""
    page = (ROOT / "docs" / "architecture_core.md").read_text(encoding="utf-8")
    table = page.partition(f"| {header} |")[2].partition("\n\n")[0]
    return [set(re.findall(r"`(\w+)`", line.split("|")[1])) for line in table.splitlines()[2:]]


def hidden() -> dict[str, set[str]]:
    """`PRIVATE` of tests/hide_names.py, which imports nothing of ours."""
    from tests.hide_names import PRIVATE

    return PRIVATE


def test_the_page_lists_the_names_and_those_that_are_no_longer_used() -> None:
    names = [name for of_place in hidden().values() for name in sorted(of_place)]
    assert sorted(name for row in rows("private names") for name in row) == sorted(names)
    gone = set().union(*rows("no longer used"))
    assert gone
    assert gone.isdisjoint(names)
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in gone - WRITTEN:
                assert isinstance(node.value, ast.Name), (path, node.lineno)
                assert node.value.id == "self", (path, node.lineno)


def test_private_names_stand_in_one_file() -> None:
    own = {name for path in SOURCES for name in defined(path)}
    found = {path.name: set(private_names_of(path)) - own - OTHERS - WRITTEN for path in SOURCES if path != LOOKED_UP}
    assert {file: names for file, names in found.items() if names} == {}
    assert set(private_names_of(LOOKED_UP)) - own <= set().union(*hidden().values()) | WRITTEN


# ---------------------------------------------------------------------- without them


def run_without(*sets: str) -> list[dict[str, Any]]:
    """Results of tests/hide_names.py: with all names first, then without each set."""
    command = [sys.executable, "-m", "tests.hide_names", "none", *sets]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one.get("error") for one in results] == [None] * (1 + len(sets))
    assert all(one["help"] for one in results)
    return results


def check_same(one: dict[str, Any], whole: dict[str, Any], names: set[str]) -> None:
    assert one["sequential"] == whole["sequential"]
    assert one["groups"] == (not names & ALONE)
    if not names & (ALONE | IN_GROUPS_OF_EQUAL_BATCHES):
        assert one["auto"] == whole["auto"]
    assert one["auto loss"] == pytest.approx(whole["auto loss"], rel=1e-6)
    assert one["passing"] == ["passing"]
    # (3 + 3) / (2 + 2): the states are sums
    merged = 1.5 if not names & {"_computed", "_reductions", "_update_count"} else "do not merge over processes"
    assert one["merged"] == merged or str(merged) in str(one["merged"])


def test_without_any_of_them_the_quickstart_gives_the_same_bits() -> None:
    names = set().union(*hidden().values())
    whole, bare = run_without(",".join(sorted(names)))
    assert whole["groups"]
    check_same(bare, whole, names)


@pytest.mark.long
def test_without_each_name_the_quickstart_and_groups_give_the_same() -> None:
    names = sorted(set().union(*hidden().values()))
    whole, *others = run_without(*names)
    assert whole["groups"]
    for one, name in zip(others, names, strict=True):
        assert one["asked"] == [name]
        check_same(one, whole, {name})


# ---------------------------------------------------------------------- what replaces them


@pytest.mark.parametrize("name", private_names._FOREACH)
def test_a_loop_over_tensors_gives_the_bits_of_the_operation_on_lists(name: str) -> None:
    def lists(seed: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.rand(size, generator=generator) + 0.5 for size in ((3,), (2, 5), ())]

    others: dict[str, list[Any]] = {
        "addcmul_": [lists(1), lists(2)], "copy_": [lists(1)], "div": [torch.tensor(3.0)], "lerp_": [lists(1), 0.3],
        "sub": [tuple(lists(1))], "add": [0.7], "mul": [lists(1)], "mul_": [0.7],
    }  # fmt: skip
    options: dict[str, Any] = {"addcmul_": {"value": -0.1}, "norm": {"dtype": torch.float64}}.get(name, {})
    ours, theirs = lists(0), lists(0)
    mine = partial(private_names._each, getattr(Tensor, name))(ours, *others.get(name, []), **options)
    found = getattr(torch, f"_foreach_{name}")(theirs, *others.get(name, []), **options)
    assert all(one.equal(other) for one, other in zip(ours, theirs, strict=True))
    assert all(one.equal(other) for one, other in zip(mine, found or theirs, strict=True))


Pair = namedtuple("Pair", ["x", "y"])


def test_nested_values_have_the_leaves_of_torch_in_their_order() -> None:
    tree = {"b": [torch.ones(2), 3], "a": Pair((None, "z"), torch.max(torch.eye(2), 0)), "c": 4}
    leaves, form = private_names._flatten(tree)
    theirs = _pytree.tree_leaves(tree)
    assert len(leaves) == len(theirs)
    assert all(one is other for one, other in zip(leaves, theirs, strict=True))
    again = private_names._unflatten(leaves, form)
    assert list(again) == ["b", "a", "c"]
    assert type(again["a"]) is Pair
    assert again["a"].y.indices is tree["a"].y.indices
    assert form == private_names._flatten({"b": [0, 0], "a": Pair((0, 0), torch.max(torch.eye(2), 0)), "c": 0})[1]
    assert form != private_names._flatten({key: tree[key] for key in ("a", "b", "c")})[1]
    assert private_names._flatten([1])[1] != private_names._flatten((1,))[1]


def test_softmax_has_the_gradient_that_autograd_finds() -> None:
    scores = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    gradient, output = torch.randn(3, 4, dtype=torch.float64), scores.softmax(-1)
    (expected,) = torch.autograd.grad(output, scores, gradient)
    torch.testing.assert_close(private_names._softmax_backward(gradient, output, -1, output.dtype), expected)


def test_batch_norms_of_other_libraries_are_known_by_their_base() -> None:
    class Theirs(torch.nn.modules.batchnorm._BatchNorm):
        pass

    assert isinstance(Theirs(2), private_names.BATCH_NORMS)
    assert not isinstance(torch.nn.InstanceNorm1d(2), private_names.BATCH_NORMS)
