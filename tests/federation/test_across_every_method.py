"""Every method of ``configs/method`` over nodes ends in the bits of one process.

Eight clients live on three nodes; four take part in a round. The public set lies on the server and on every node.
"""

from __future__ import annotations

from collections.abc import Sequence
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
# A product with one sample depends, in its last digits, on where the tensors begin in memory: with 13 units a vector of
# all parameters, a pack of states and a message leave most of them at places that no tensor of its own would get.
ONE = ["--data.init_args.batch_size", "1", "--model.init_args.network_args", "{hidden: [13]}"]
OF_ONE = ("fedgen", "feddr_plus", "fedntd", "hfedckd", "moon")  # these five differed


def parts_of(name: str, folder: Path, more: Sequence[str] = ()) -> Parts:
    """The parts of a run, made as a command makes them."""
    import_named()
    parser = Parser(exit_on_error=False)
    node.add_arguments(parser)
    line = CommandLine(["node", *words_of(name, folder, ROUNDS), *more, "--client", "0"])
    made, parts = make(Call(line.parse(parser), parser, line.words))
    return Parts(made, *parts)


def check(name: str, folder: Path, more: Sequence[str] = ()) -> None:
    one = run_method(name, folder / "one", ROUNDS, more=more)
    other = deploy(lambda root: parts_of(name, root, more), folder / "other", HOMES)
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


def test_over_nodes_is_in_one_process_for_batches_of_one_sample(tmp_path: Path) -> None:
    check(OF_ONE[0], tmp_path, ONE)


@pytest.mark.long
@pytest.mark.parametrize("method", OF_ONE[1:])
def test_over_nodes_is_in_one_process_for_batches_of_one_sample_of_all_others(method: str, tmp_path: Path) -> None:
    check(method, tmp_path, ONE)
