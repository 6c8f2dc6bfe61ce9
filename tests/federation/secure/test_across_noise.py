"""Noise that nodes add to a secure sum: its amount, its account, that it is used once, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed.errors import BudgetSpent, ConfigError
from lit_fed.federation.messages.wire import Message
from lit_fed.federation.node.node import Node
from lit_fed.federation.secure.messages import TooFew
from lit_fed.federation.secure.noise import discrete_gaussian
from lit_fed.federation.secure.summed import SummedSecurely
from lit_fed.participation import FullParticipation, Participation, PoissonParticipation, UniformParticipation
from lit_fed.privacy import ClientLevel, SecureSum
from lit_fed.privacy.accounting import Mechanism, calibrate
from lit_fed.privacy.keys import RunKey
from lit_fed.protocols import ClientTest, GlobalTest
from tests.federation.secure.nodes import Killed, Watched, make, run
from tests.federation.support import Make, nodes_of, simulate
from tests.privacy.support import uniform
from tests.support import assert_same, fit, rows, weights

pytest.importorskip("dp_accounting")
HOMES = [[0, 4], [1], [2], [3]]  # client k on node k modulo 4, as in a simulation of four nodes
W = "network.weight"


def noisy(
    key: bool = False,
    nodes: int | None = None,
    rounds: int = 2,
    participation: Any = None,
    method: Any = uniform,
    **more: Any,
) -> Make:
    """Parts in which three of four nodes' noise suffices; a node's file holds its key."""

    def parts(folder: Path) -> Any:
        folder.mkdir(parents=True, exist_ok=True)
        at_node = "node_" in folder.name
        given = {"noise_multiplier": 2.0, "delta": 0.01, "honest_nodes": 3, **more}
        file = str(folder / "key") if at_node or key else None
        settings = {"privacy": ClientLevel(0.5, key_file=file, **given), "secure_sum": SecureSum(3, 0.5, nodes)}
        common = {
            "participation": participation or FullParticipation(),
            "protocols": [GlobalTest()],
            "on_client_failure": "skip",
        }
        return make(method, max_rounds=rounds, **common, **settings)(folder)

    return parts


def privacy_of(node: Node) -> Any:
    return node.federation.wrappers.stack[0]


def seeded(nodes: list[Node]) -> list[Node]:
    """Nodes whose noise follows from the run's seed."""
    for node in nodes:
        privacy_of(node)._key = RunKey.of_seed(0)
    return nodes


def lines(folder: Path) -> dict[str, list[str]]:
    """The releases in each node's file."""
    return {path.parent.name: path.read_text().splitlines()[1:] for path in folder.rglob("node_*/key")}


# ---------------------------------------------------------------------- the sum


def test_a_noisy_sum_by_hand(tmp_path: Path) -> None:
    """Updates (½, 0) and (0, ½); σ = 1 · ½ / √3 = 0.289 is 605,395 grids of 2⁻²¹ and a part, so that s is 605,397."""
    made = fit(
        tmp_path, algorithm=uniform(), max_rounds=1, participation=FullParticipation(),
        privacy=ClientLevel(0.5, 1.0, delta=0.01, honest_nodes=3), secure_sum=SecureSum(4, 0.5, nodes=5),
    )  # fmt: skip
    assert 605_395 < 2**21 * 0.5 / math.sqrt(3) < 605_396
    key, noise = RunKey.of_seed(0), torch.zeros(2, dtype=torch.int64)
    for node in range(5):
        secret = key.secret(key.release(0, (node,), torch.zeros(0).numpy()))
        noise += torch.from_numpy(discrete_gaussian(secret, 605_397, 2))
    due = (torch.tensor([0.5, 0.5], dtype=torch.float64) + noise * 2.0**-21) / 2
    assert weights(made)[W].tolist() == [due.float().tolist()]


@pytest.mark.parametrize(
    "participation",
    [FullParticipation(), UniformParticipation(count=2), PoissonParticipation(fraction=1e-9)],
    ids=["all", "two", "none"],
)
def test_over_nodes_a_run_has_the_simulations_bits(tmp_path: Path, participation: Participation) -> None:
    """Of two clients a round, nodes without work add their noise to zeros; of none, all nodes do."""
    one = simulate(noisy(nodes=4, participation=participation), tmp_path / "one")
    given = noisy(participation=participation)
    other = run(given, tmp_path / "other", nodes=seeded(nodes_of(given, tmp_path, HOMES)))
    assert_same(weights(one), weights(other))
    told = [[row["privacy/epsilon"] for row in rows(made.log_dir / "metrics.csv")] for made in (one, other)]
    assert told[0] == told[1]
    assert {name for name in rows(one.log_dir / "metrics.csv")[0] if "train/" in name} <= {"train/lr"}


def test_noise_of_h_nodes_has_the_deviation_that_is_accounted_for() -> None:
    """Each of h = 3 nodes has z C / √3, within a millionth; five nodes together have more."""
    privacy = ClientLevel(0.5, 2.0, honest_nodes=3)
    privacy._share(2.0)
    privacy._key = RunKey.of_seed(1)
    assert 1 < privacy.deviation * privacy.grid * math.sqrt(3) < 1 + 4e-6
    summed = SummedSecurely(SecureSum(4, 0.5, nodes=5))
    summed.negotiate([privacy])
    words = summed.noised(torch.zeros(5, 40_003, dtype=torch.int64), 0).double() * privacy.grid
    assert words[:, 40_000:].abs().max() == 0
    for part, variance in ((words[:3], 1.0), (words, 5 / 3)):
        found = part.sum(0)[:40_000].var().item()
        assert abs(found - variance) < 5 * variance * math.sqrt(2 / 40_000)


# ---------------------------------------------------------------------- the account


def test_no_amplification_is_counted_as_the_server_knows_the_cohort(tmp_path: Path) -> None:
    made = simulate(noisy(nodes=4), tmp_path)
    due = Mechanism("known", 5, 5, 2.0).epsilon({1: 2}, 0.01)[0]
    assert made.metrics["privacy/epsilon"] == due
    assert due == Mechanism("poisson", 5, 5, 2.0).rdp_epsilon({1: 2}, 0.01)
    card = (made.log_dir / "privacy.md").read_text()
    assert "at least 3 honest nodes" in card
    assert "floating point" not in card


def test_a_budget_is_kept_on_both_ends(tmp_path: Path) -> None:
    """A server and a node find the same noise; of another number of rounds a node refuses the server's."""
    budget = {"noise_multiplier": None, "epsilon": 4.0}
    nodes = nodes_of(noisy(**budget), tmp_path, HOMES)
    made = run(noisy(**budget), tmp_path, nodes=nodes)
    assert made.metrics["privacy/epsilon"] <= 4.0
    assert made.run.federation.server["around.privacy"]["noise_multiplier"] == calibrate("known", 5, 5, 2, 4.0, 0.01)
    grids = list[Watched]()
    others = nodes_of(noisy(rounds=3, **budget), tmp_path / "others", HOMES)
    with pytest.raises(TooFew):
        run(noisy(**budget), tmp_path / "two", nodes=others, grids=grids)
    (line,) = set(grids[0].causes)
    assert line.startswith("the server accounts for other noise than this node adds; set trainer.max_rounds alike")


def test_a_node_keeps_its_own_account_whatever_the_server_asks(tmp_path: Path) -> None:
    nodes = nodes_of(noisy(noise_multiplier=None, epsilon=4.0), tmp_path, HOMES)
    own = privacy_of(nodes[0])
    for round_idx in (0, 1):
        assert len(own.secret(0, round_idx, b"request", b"sum")) == 32
        own.charge(round_idx, b"request")
        own.charge(round_idx, b"request")  # again, as after a kill, at no cost
    with pytest.raises(BudgetSpent, match=r"2 sums have spent epsilon 4\.0 at delta 0\.01 of this node"):
        own.secret(0, 2, b"request", b"sum")


# ---------------------------------------------------------------------- used once


def test_noise_is_of_one_sum_and_a_round_gets_no_second(tmp_path: Path) -> None:
    """The file remembers it when the node has started again."""
    first = privacy_of(nodes_of(noisy(), tmp_path, HOMES)[0])
    secrets = {first.secret(0, 0, request, content) for request in (b"one", b"two") for content in (b"sum", b"more")}
    assert len(secrets) == 4
    first.charge(0, b"one")
    again = privacy_of(nodes_of(noisy(), tmp_path, HOMES)[0])
    for request in (b"one", b"two"):
        for content in (b"sum", b"more"):
            with pytest.raises(BudgetSpent, match="round 0 got this node's noise before, for another request or run"):
                again.secret(0, 0, request, content)
    assert again.secret(0, 1, b"one", b"sum") not in secrets
    again.charge(1, b"one")
    assert [line.split()[0] for line in lines(tmp_path)["node_0"]] == ["0", "1"]


@pytest.mark.parametrize("stage", ["vectors", "consents", "total"])
def test_killed_and_resumed_no_noise_is_added_twice(tmp_path: Path, stage: str) -> None:
    """The nodes start again, too, and give round 1 the noise that they gave it before."""

    def kill(node: int, message: Message) -> Message:
        now[0] = message.fields["round"] if message.word == "train" else now[0]
        if now[0] == 1 and node == 4 and message.fields.get("stage") == stage:
            raise Killed
        return message

    now = [0]
    with pytest.raises(Killed):
        run(noisy(), tmp_path, kill, nodes_of(noisy(), tmp_path, HOMES))
    before = lines(tmp_path)
    assert all([line.split()[0] for line in given] == ["0", "1"] for given in before.values())
    run(noisy(), tmp_path, nodes=nodes_of(noisy(), tmp_path, HOMES), ckpt_path="last")
    assert lines(tmp_path) == before


def test_a_simulation_with_a_key_draws_noise_of_the_sum_and_resumes(tmp_path: Path) -> None:
    whole = simulate(noisy(nodes=4, rounds=3), tmp_path / "whole")
    half = simulate(noisy(nodes=4, rounds=1), tmp_path / "half")
    on = simulate(noisy(nodes=4, rounds=3), tmp_path / "half", str(half.log_dir))
    assert_same(weights(whole), weights(on))
    keyed = simulate(noisy(key=True, nodes=4), tmp_path / "keyed")
    assert not torch.equal(weights(keyed)[W], weights(whole)[W])
    assert keyed.metrics["privacy/epsilon"] == Mechanism("known", 5, 5, 2.0).epsilon({1: 2}, 0.01)[0]


# ---------------------------------------------------------------------- survivors


@pytest.mark.parametrize("lost", [1, 2])
def test_a_sum_of_fewer_than_t_nodes_noise_is_refused(tmp_path: Path, lost: int) -> None:
    def lose(node: int, message: Message) -> Message | None:
        return None if node <= lost and message.fields.get("stage") == "vectors" else message

    nodes = nodes_of(noisy(), tmp_path, HOMES)
    if lost == 1:
        made = run(noisy(rounds=1), tmp_path, lose, nodes)
        assert rows(made.log_dir / "metrics.csv")[0]["secure_sum/nodes"] == "3"
        return
    with pytest.raises(TooFew, match="2 of 4 nodes are left for the sum, and 3 are needed"):
        run(noisy(rounds=1), tmp_path, lose, nodes)


def test_neither_metrics_nor_clipped_updates_are_counted(tmp_path: Path) -> None:
    """Words of a vector: two values, and three counts."""
    grids = list[Watched]()
    nodes = nodes_of(noisy(), tmp_path, HOMES)
    run(noisy(), tmp_path, nodes=nodes, grids=grids)
    seen = 0
    for _, message, answer in grids[0].crossed:
        if message.word == "secure" and message.fields["stage"] == "keys":
            assert message.fields["names"] == []
        if message.word == "secure" and message.fields["stage"] == "vectors":
            seen += 1
            assert answer.tensors["secure"]["words"].numel() == 2 + 3
    assert seen == 8


@pytest.mark.parametrize(
    ("field", "value", "line"),
    [
        ("names", ["train/loss"], "metrics of training are not summed where trainer.privacy.honest_nodes is set"),
        ("deviation", 1, "the server accounts for other noise than this node adds"),
        ("grid", 2.0**-40, "the server accounts for other noise than this node adds"),
    ],
)
def test_a_server_that_would_have_less_noise_is_refused(tmp_path: Path, field: str, value: Any, line: str) -> None:
    """More names would leave fewer coordinates for the noise of a node without clients, which knows no model."""

    def change(_: int, message: Message) -> Message:
        if message.fields.get("stage") != "keys":
            return message
        return Message("secure", {**message.fields, field: value}, message.tensors)

    grids = list[Watched]()
    with pytest.raises(TooFew):
        run(noisy(), tmp_path, change, nodes_of(noisy(), tmp_path, HOMES), grids=grids)
    assert [cause.startswith(line) for cause in set(grids[0].causes)] == [True]


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("more", "line"),
    [
        ({"secure_sum": None}, "honest_nodes is 3, and a sum is sure to have only trainer.secure_sum.threshold nodes"),
        (
            {"secure_sum": SecureSum(4, 0.5)},
            "honest_nodes is 3, and each node adds noise of its own; set trainer.secure_s",
        ),
        ({"privacy": ClientLevel(0.5, 1.0, honest_nodes=5)}, "trainer.privacy.honest_nodes is 5"),
        ({"privacy": ClientLevel(0.5, 1e-7, honest_nodes=3)}, "noise_multiplier is 1e-07, too little to be shared"),
        ({"privacy": ClientLevel(0.5, 0.0, honest_nodes=3)}, "noise_multiplier is 0.0, too little to be shared"),
    ],
)
def test_settings_that_protect_nobody_are_refused(tmp_path: Path, more: dict[str, Any], line: str) -> None:
    given = {"secure_sum": SecureSum(4, 0.5, nodes=5), "privacy": ClientLevel(0.5, 1.0, honest_nodes=3), **more}
    with pytest.raises(ConfigError, match=line):
        fit(tmp_path, algorithm=uniform(), participation=FullParticipation(), **given)


def test_a_number_of_nodes_out_of_range_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.privacy\.honest_nodes is 0"):
        ClientLevel(0.5, 1.0, honest_nodes=0)


def test_a_run_goes_on_with_its_own_number_of_honest_nodes(tmp_path: Path) -> None:
    made = simulate(noisy(nodes=4, rounds=1), tmp_path)
    with pytest.raises(ConfigError, match="honest_nodes is 2, and the run began with 3; keep it"):
        simulate(noisy(nodes=4, honest_nodes=2), tmp_path, str(made.log_dir))


def test_a_node_needs_a_key_and_tells_nothing_beside_the_sum(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.privacy\.key_file is None, and whoever has trainer\.seed could"):
        nodes_of(lambda folder: noisy()(folder.parent / "without"), tmp_path, HOMES)
    told = make(
        uniform, protocols=[ClientTest()], on_client_failure="skip", participation=FullParticipation(),
        privacy=ClientLevel(0.5, 1.0, key_file=str(tmp_path / "key"), honest_nodes=3),
    )  # fmt: skip
    with pytest.raises(
        ConfigError, match=r"trainer\.protocols has ClientTest, by which this node tells of its clients"
    ):
        nodes_of(told, tmp_path, HOMES)
    (node, *_) = nodes_of(noisy(), tmp_path / "nodes", HOMES)
    assert all(report.histogram is None for report in node.reports.values())
