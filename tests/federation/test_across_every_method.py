"""Every method of ``configs/method`` over nodes ends in the bits of one process.

Eight clients live on three nodes; four take part in a round. The public set lies on the server and on every node.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lit_fed.command.command import Call
from lit_fed.command.reading.words import CommandLine
from lit_fed.command.roots import import_named
from lit_fed.engine.storage.store import read_table
from lit_fed.federation.commands import node
from lit_fed.federation.commands.deployed import make
from lit_fed.parsing import Parser
from tests.federation.support import Parts, assert_same_states, deploy
from tests.methods.run_methods import METHODS, VARIANTS, run_method, words_of
from tests.support import assert_same, saved_weights

SOON = ("fedavg", "fedavg_kept", "fedfrozen", "fedper", "scaffold", "uwa")
ROUNDS = 3
HOMES = [[0, 1, 2], [3, 4, 5], [6, 7]]


def parts_of(name: str, folder: Path) -> Parts:
    """The parts of a run, made as a command makes them."""
    import_named()
    parser = Parser(exit_on_error=False)
    node.add_arguments(parser)
    line = CommandLine(["node", *words_of(name, folder, ROUNDS), "--client", "0"])
    made, parts = make(Call(line.parse(parser), parser, line.words))
    return Parts(made, *parts)


def check(name: str, folder: Path) -> None:
    one = run_method(name, folder / "one", ROUNDS)
    other = deploy(lambda root: parts_of(name, root), folder / "other", HOMES)
    assert_same(saved_weights(one), saved_weights(other.log_dir))
    index = read_table(torch.load(one / "checkpoints" / "last.ckpt", weights_only=True)["clients"])
    assert_same_states(other, folder / "other", index)


@pytest.mark.parametrize("method", SOON)
def test_over_nodes_is_in_one_process(method: str, tmp_path: Path) -> None:
    check(method, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("method", sorted((METHODS.keys() | VARIANTS.keys()) - set(SOON)))
def test_over_nodes_is_in_one_process_for_all_others(method: str, tmp_path: Path) -> None:
    check(method, tmp_path)
