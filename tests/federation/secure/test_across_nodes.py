"""`trainer.secure_sum` over nodes: the plain sum's bits, whatever is lost, and nothing of a single node in clear."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed.errors import ConfigError
from lit_fed.federation.messages.settings import agreed, difference
from lit_fed.federation.messages.wire import Message
from lit_fed.federation.secure.messages import TooFew
from lit_fed.federation.server.executor import Patience
from lit_fed.federation.server.federate import federate
from lit_fed.methods import FedAsync, FedAvg, Scaffold
from lit_fed.participation import Fate, FullParticipation, Participant, UniformParticipation
from lit_fed.privacy import ClientLevel, SecureSum
from tests.federation.secure.nodes import HOMES, STAGES, Killed, Watched, is_at, killed_in_evaluation_of, make, run
from tests.federation.support import deploy, nodes_of, simulate
from tests.support import assert_same, rows, weights


def told(folder: Path) -> list[dict[str, str]]:
    """What does not depend on where clients are."""
    wanted = ("global/", "train/", "privacy/", "participation/")
    return [
        {key: value for key, value in row.items() if key.startswith(wanted) or "_mean" in key}
        for row in rows(folder / "metrics.csv")
    ]


def uniform() -> FedAvg:
    return FedAvg(weighting="uniform")


PRIVATE = {"privacy": ClientLevel(0.5, 30.0, delta=0.01), "participation": FullParticipation()}


@pytest.mark.parametrize(
    ("method", "more"),
    [
        (FedAvg, {}),
        (uniform, {}),
        (Scaffold, {}),
        (FedAvg, {"participation": UniformParticipation(count=2)}),
        (uniform, PRIVATE),
        (FedAvg, {"secure_sum": SecureSum(3, 0.5, dishonest=0)}),
    ],
    ids=["fedavg", "uniform", "scaffold", "two clients a round", "private", "neighbours"],
)
def test_over_nodes_a_run_has_the_simulations_bits(tmp_path: Path, method: Any, more: dict[str, Any]) -> None:
    """Two clients a round leave nodes without work, which add zeros."""
    if private := "privacy" in more:
        pytest.importorskip("dp_accounting")
    given = make(method, max_rounds=3, **more)
    own = {"smallest_sum": 2} if "participation" in more and not private else {}
    one, other = simulate(given, tmp_path / "one"), deploy(given, tmp_path / "other", HOMES, own=own)
    assert_same(weights(one), weights(other))
    assert told(one.log_dir) == told(other.log_dir)
    assert rows(other.log_dir / "clients.csv") == []
    (row, *_) = rows(other.log_dir / "metrics.csv")
    assert (row["secure_sum/nodes"], row["secure_sum/attempts"]) == ("4", "1")


def test_a_private_run_over_nodes_has_the_bits_of_one_without_the_secure_sum(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    summed, plain = make(uniform, **PRIVATE), make(uniform, **{**PRIVATE, "secure_sum": None})
    assert_same(weights(deploy(summed, tmp_path / "one", HOMES)), weights(simulate(plain, tmp_path / "other")))


# ---------------------------------------------------------------------- what crosses


def test_nothing_of_a_single_node_crosses_in_clear(tmp_path: Path) -> None:
    """Answers to training and evaluation are empty, and no value that a node keeps is among the bytes that it sends."""
    nodes, grids = nodes_of(make(), tmp_path, HOMES), list[Watched]()
    kept: dict[int, set[bytes]] = {place: set() for place in range(1, 5)}

    def change(node: int, message: Message) -> Message:
        own = nodes[node - 1].sums
        assert own is not None
        if is_at(message, "total"):
            for client_id, update in own._updates.items():
                kept[node] |= {tensor.numpy().tobytes() for tensor in update.payload.values()}
                kept[node] |= {
                    torch.tensor(value).double().numpy().tobytes() for value in own._logged[client_id][0].values()
                }
        return message

    run(make(), tmp_path, change, nodes, grids=grids)
    words = set()
    for node, message, answer in grids[0].crossed:
        words.add(message.word)
        if message.word in ("train", "ask"):
            assert answer.tensors["payload"] == {}
            assert answer.fields["metrics"].keys() <= {"lr"}
            assert (answer.fields["weight"], answer.fields["sums"]) == (0, {})
        sent = [tensor.numpy().tobytes() for payload in answer.tensors.values() for tensor in payload.values()]
        assert not any(value in blob for value in kept[node] for blob in sent)
    assert words == {"hello", "train", "secure", "ask", "keep"}
    assert all(kept.values())


def test_what_a_node_sends_at_each_stage(tmp_path: Path) -> None:
    """The fields of SECURITY.md's table, and no tensor but the masked vector."""
    grids = list[Watched]()
    run(make(), tmp_path, grids=grids)
    due = {
        "offer": {"names", "key"}, "keys": {"name", "masking", "sealing", "clients", "signature"},
        "shares": {"shares", "commitment"}, "vectors": set(), "consents": {"signature"}, "total": {"seeds", "keys"},
    }  # fmt: skip
    seen = set()
    for _, message, answer in grids[0].crossed:
        if message.word == "secure":
            stage = message.fields["stage"]
            seen.add(stage)
            assert answer.fields["message"].keys() == due[stage]
            assert list(answer.tensors["secure"]) == (["words"] if stage == "vectors" else [])
    assert seen == set(STAGES)


# ---------------------------------------------------------------------- losses


class Losing(FullParticipation):
    """Loses the updates of some clients in round 1."""

    def __init__(self, lost: set[int]) -> None:
        super().__init__()
        self.lost = lost

    def plan(self, round_idx: int) -> list[Participant]:
        return [
            replace(one, fate=Fate.LOST_AFTER) if round_idx == 1 and one.client_id in self.lost else one
            for one in super().plan(round_idx)
        ]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The weights of simulations in which clients' updates of round 1 are lost."""
    found: dict[tuple[int, ...], Any] = {}

    def of(lost: tuple[int, ...]) -> Any:
        if lost not in found:
            folder = tmp_path_factory.mktemp("without")
            found[lost] = weights(simulate(make(participation=Losing(set(lost))), folder))
        return found[lost]

    return of


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("lost", [1, 3])
def test_a_node_lost_at_any_stage_costs_its_own_vector_alone(
    tmp_path: Path, without: Any, stage: str, lost: int
) -> None:
    """Before its vector is there it costs that; later its shares are not needed."""
    gone, now = set[int](), [0]

    def change(node: int, message: Message) -> Message | None:
        now[0] = message.fields["round"] if message.word == "train" else now[0]
        gone.update([lost] if now[0] == 1 and node == lost and is_at(message, stage) else [])
        return None if node in gone else message

    made = run(make(on_client_failure="skip"), tmp_path, change)
    costs = STAGES.index(stage) <= STAGES.index("vectors")
    assert_same(weights(made), without(tuple(HOMES[lost - 1]) if costs else ()))
    count = 5 - len(HOMES[lost - 1]) * costs
    assert rows(made.log_dir / "metrics.csv")[-1]["participation/count"] == str(count)


def test_below_the_threshold_the_round_is_repeated_with_fresh_keys(tmp_path: Path, without: Any) -> None:
    lost, grids = list[int](), list[Watched]()

    def change(node: int, message: Message) -> Message | None:
        if is_at(message, "vectors") and len(lost) < 2:
            lost.append(node)
            return None
        return message

    made = run(make(), tmp_path, change, grids=grids)
    assert_same(weights(made), without(()))
    assert rows(made.log_dir / "metrics.csv")[0]["secure_sum/attempts"] == "2"
    keys = [
        answer.fields["message"]["masking"]
        for _, message, answer in grids[0].crossed
        if is_at(message, "keys", round_idx=0)
    ]
    assert len(keys) == len(set(keys)) == 8


def test_too_few_nodes_stop_the_run_with_one_line(tmp_path: Path) -> None:
    def change(node: int, message: Message) -> Message | None:
        return None if node < 3 and message.word == "secure" and message.fields["stage"] == "shares" else message

    with pytest.raises(TooFew) as caught:
        run(make(), tmp_path, change)
    assert str(caught.value) == (
        "round 0 has no secure sum after 3 attempts: 2 of 4 nodes are left for masking, and 3 are needed"
    )


class Hanging(Watched):
    """Its node 1 takes the keys of others, and answers nothing."""

    def pull(self, message_ids: Any) -> Any:
        hung = {
            one
            for one in message_ids
            if self._waiting[one][0] == 1 and b'"stage":"shares"' in self._waiting[one][1][:400]
        }
        yield from super().pull([one for one in message_ids if one not in hung])


def test_a_node_that_hangs_costs_its_deadline_once_a_round(tmp_path: Path) -> None:
    """It is asked nothing more in the round: neither for evaluations, nor for their sums."""
    given = make(on_client_failure="skip", max_rounds=1)
    nodes = nodes_of(given, tmp_path, HOMES)
    made, *parts = given(tmp_path)
    with ExitStack() as stack:
        for node in nodes:
            stack.enter_context(node.at_work())
        federate(grid := Hanging(nodes), made, *parts, patience=Patience(round_s=0.5))
    to_it = [message.word for node, message, _ in grid.crossed if node == 1]
    assert to_it == ["hello", "train", "secure", "secure", "keep"]
    assert rows(made.log_dir / "metrics.csv")[0]["secure_sum/nodes"] == "3"


# ---------------------------------------------------------------------- kills


@pytest.mark.parametrize("node", [1, 4])
@pytest.mark.parametrize("place", [*STAGES, "ask", "keep"])
def test_killed_anywhere_and_resumed_is_uninterrupted(tmp_path: Path, without: Any, place: str, node: int) -> None:
    """The nodes live on, and remember what they have unmasked; a resumed server asks for the same sum again."""
    nodes, now = nodes_of(make(), tmp_path, HOMES), [0]

    def change(at: int, message: Message) -> Message:
        now[0] = message.fields["round"] if message.word == "train" else now[0]
        if now[0] == 1 and at == node and (is_at(message, place) or message.word == place):
            raise Killed
        return message

    with pytest.raises(Killed):
        run(make(), tmp_path, change, nodes)
    assert_same(weights(run(make(), tmp_path, nodes=nodes, ckpt_path="last")), without(()))


def test_an_unmasked_round_is_not_summed_over_other_nodes_after_a_kill(tmp_path: Path) -> None:
    nodes, grids = nodes_of(make(), tmp_path, HOMES), list[Watched]()

    def lose(at: int, message: Message) -> Message | None:
        return None if at == 1 and is_at(message, "vectors") else message

    with pytest.raises(Killed):
        run(make(), tmp_path, killed_in_evaluation_of(1), nodes)
    with pytest.raises(TooFew, match="round 1 has no secure sum after 3 attempts: 0 of 4 nodes are left for consent"):
        run(make(), tmp_path, lose, nodes, "last", grids)
    assert set(grids[0].causes) == {
        "this node consented to a sum of round 1 over other nodes; a second sum would tell of single nodes"
    }


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "homes", "line"),
    [
        (
            SecureSum(3, 0.5, nodes=4),
            HOMES,
            "trainer.secure_sum.nodes is 4, the number of nodes in memory; leave it out",
        ),
        (SecureSum(3, 0.5, dishonest=2), HOMES, "trainer.secure_sum.dishonest is 2"),
        (SecureSum(3, 0.5), [[0, 1, 2, 3, 4]], "trainer.secure_sum.threshold is 3, and 1 nodes are connected"),
        (
            SecureSum(3, 0.5),
            [[0], [1], [2], [3], [4]],
            "threshold is 3, and 5 nodes are connected; it must be above two",
        ),
    ],
)
def test_settings_that_protect_nobody_are_refused(tmp_path: Path, settings: Any, homes: Any, line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        deploy(make(secure_sum=settings), tmp_path, homes)


def test_a_node_that_reports_aggregates_and_one_beyond_its_peers_are_refused(tmp_path: Path) -> None:
    from lit_fed.federation.secure.signer import Signer

    with pytest.raises(
        ConfigError, match=r"--report is aggregate, and trainer\.secure_sum sums metrics over all nodes"
    ):
        nodes_of(make(), tmp_path, [[0, 1]], report="aggregate")
    with pytest.raises(ConfigError, match="--peers lacks this node's own key"):
        nodes_of(make(), tmp_path, [[0, 1]], signer=Signer(peers=frozenset()))


def test_a_method_that_changes_updates_as_they_arrive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="and the server of FedAsync changes each as it arrives; simulate it"):
        deploy(make(FedAsync), tmp_path, HOMES)


def test_both_ends_have_the_setting_alike() -> None:
    node, server = (agreed(f"trainer: {{secure_sum: {{threshold: 3, clip: {clip}}}}}") for clip in (0.25, 0.5))
    assert difference(node, server) == "trainer.secure_sum.clip is 0.25 on the node and 0.5 on the server"
