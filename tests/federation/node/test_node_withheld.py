"""A node that withholds its clients' metrics: their sums leave it, and the means are those of a simulation."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from lit_fed.callbacks import Checkpoint
from lit_fed.data import Digits
from lit_fed.errors import CheckpointError, ConfigError, WireError
from lit_fed.federation.messages.wire import Message, check_sums, decode, encode
from lit_fed.federation.node.node import Node
from lit_fed.methods import FedAvg, Scaffold
from lit_fed.participation import UniformParticipation
from lit_fed.protocols import ClientTest, GlobalTest, PersonalTest
from lit_fed.tasks import Classifier
from tests.federation.support import Make, Parts, deploy, nodes_of, simulate, small
from tests.federation.test_across_faults import Restarting, wanderers, with_grid
from tests.support import Points, Unlucky, assert_same, rows, trainer, weights

AGGREGATE = {"report": "aggregate", "report_least": 1}
HOMES = [[0, 3, 5], [1], [2, 4, 6, 7, 8]]


def digits(algorithm: Any = FedAvg, **kwargs: Any) -> Make:
    """Nine clients, whose accuracies and losses are no round numbers."""

    def make(folder: Path) -> Parts:
        import torch

        torch.manual_seed(0)
        data = Digits(num_clients=9, max_train_samples=300, val_fraction=0.1)
        model = Classifier("mlp", num_classes=10, in_channels=1, input_shape=data.input_shape)
        protocols = [GlobalTest(), ClientTest(), PersonalTest(epochs=1)]
        settings = {"max_rounds": 2, "participation": UniformParticipation(count=5), "protocols": protocols}
        settings["callbacks"] = [Checkpoint("val/clients/loss_mean")]  # `auto` takes the global model's in a simulation
        return Parts(trainer(folder, **settings | kwargs), model, data, algorithm())

    return make


def recorded(answers: list[Message]) -> Callable[[list[Node]], dict[int, Callable[[bytes], bytes]]]:
    """Nodes, of whose answers a note is taken."""

    def handler(node: Node) -> Callable[[bytes], bytes]:
        def handle(blob: bytes) -> bytes:
            answer = node.handle(blob)
            answers.append(decode(answer))
            return answer

        return handle

    return lambda nodes: {place + 1: handler(node) for place, node in enumerate(nodes)}


@pytest.mark.parametrize("algorithm", [FedAvg, Scaffold])
def test_means_are_the_simulations_to_the_bit_and_no_clients_metric_leaves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], algorithm: Any
) -> None:
    make, answers = digits(algorithm), list[Message]()
    one = simulate(make, tmp_path / "one")
    capsys.readouterr()
    other = deploy(make, tmp_path / "other", HOMES, own=AGGREGATE, handlers=recorded(answers))
    assert_same(weights(one), weights(other))
    both = zip(rows(one.log_dir / "metrics.csv"), rows(other.log_dir / "metrics.csv"), strict=True)
    for simulated, federated in both:
        kept = {
            name: value
            for name, value in simulated.items()
            if not name.endswith(("_std", "_p10", "_min", "_weighted", "_worst", "_worst10"))
        }
        timed = {name for name in kept if name.startswith(("time/", "drift/"))}
        assert federated.keys() == kept.keys()
        assert {"clients/acc_mean", "val/clients/acc_mean", "personal/loss_mean", "train/loss"} <= kept.keys() - timed
        assert {name: federated[name] for name in kept.keys() - timed} == {
            name: kept[name] for name in kept.keys() - timed
        }
    left = {row["metric"] for row in rows(other.log_dir / "clients.csv")}
    assert left == {"uplink_bytes", "downlink_bytes"}
    assert all(answer.fields.get("metrics", {}).keys() <= {"lr"} for answer in answers)
    # A sum a node, round and question: training, two protocols, and one of them on validation data too; in each round
    # somebody of every node is tested.
    assert sum(bool(answer.fields.get("sums")) for answer in answers if "client" in answer.fields) <= 2 * 3 * 4
    said = capsys.readouterr().out
    assert said.count("report metrics in sums only") == 1
    assert "the nodes of clients 0, 1, 2, 3, 4, 5, 6, 7, … report metrics in sums only" in said


def test_nodes_that_tell_and_nodes_that_do_not_give_one_mean(tmp_path: Path) -> None:
    make = digits(max_rounds=1)
    one = simulate(make, tmp_path / "one")

    def handlers(nodes: list[Node]) -> Any:
        (open_one,) = nodes_of(make, tmp_path / "open", HOMES[2:])
        at_work.append(open_one.at_work())
        at_work[0].__enter__()
        return {1: nodes[0].handle, 2: nodes[1].handle, 3: open_one.handle}

    at_work: list[Any] = []
    other = deploy(make, tmp_path / "other", HOMES, own=AGGREGATE, handlers=handlers)
    at_work[0].__exit__(None, None, None)
    for name in ("clients/acc_mean", "clients/loss_mean", "personal/acc_mean", "train/loss"):
        assert one.metrics[name] == other.metrics[name]
    assert "clients/acc_std" not in other.metrics
    told = {row["client_id"] for row in rows(other.log_dir / "clients.csv") if row["metric"] == "acc"}
    assert told == {"2", "4", "6", "7", "8"}


def test_a_client_that_fails_keeps_nobody_elses_sums_back(tmp_path: Path) -> None:
    """Client 7 of the second node raises; the means are those of the others, as in a simulation."""
    make = small(data=lambda: Points(num_clients=9), algorithm=Unlucky, on_client_failure="skip")
    one = simulate(make, tmp_path / "one")
    other = deploy(make, tmp_path / "other", [[0, 1, 2, 3], [4, 5, 6, 7], [8]], own=AGGREGATE)
    assert other.metrics["participation/failed"] == 1
    shared = {name for name in one.metrics if name.startswith(("train/", "clients/")) and name in other.metrics}
    assert {name: other.metrics[name] for name in shared} == {name: one.metrics[name] for name in shared}
    assert {"train/loss", "clients/loss_mean"} <= shared


@pytest.mark.parametrize("at", [5, 9, 14])
def test_a_node_that_was_started_again_ends_in_the_same_weights(tmp_path: Path, at: int) -> None:
    from contextlib import ExitStack

    make, stack = wanderers(), ExitStack()

    def again() -> Any:
        (node,) = nodes_of(make, tmp_path, [[0, 3]], **AGGREGATE)
        return stack.enter_context(node.at_work()).handle

    grid = type("Once", (Restarting,), {"at": at, "again": staticmethod(again)})
    with stack:
        made = with_grid(grid, make, tmp_path, [[0, 3], [1], [2, 4]])
    assert_same(weights(made), weights(simulate(make, tmp_path / "one")))


def test_a_node_tells_no_sums_of_others_clients(tmp_path: Path) -> None:
    (node,) = nodes_of(small(), tmp_path, [[0]], **AGGREGATE)
    good = {"client": 0, "round": 0, "run": "0" * 16, "boot": node.boot, "version": None, "drop": [], "frozen": {}}
    for together in ([0, 1], [], [1], [0, 0]):
        answer = decode(node.handle(encode(Message("train", {**good, "together": together}))))
        assert answer.fields["cause"] == (
            "the list of clients of a request is malformed; run the same lit_fed on both ends"
            if together == [0, 0]
            else "client 0 is not among the clients whose sums are requested"
        )


RUN = "0" * 16


def sums_of(
    node: Node, together: list[int], word: str = "train", weight: float = 0.0, **changes: Any
) -> dict[str, Any]:
    """The sums that a node tells of some clients, which all work with one model."""
    given = {"protocol": "clients", "subset": "test"} if word == "ask" else {}
    fields = {
        "round": 0,
        "run": RUN,
        "boot": node.boot,
        "version": None,
        "drop": [],
        "frozen": {},
        "together": together,
    }
    for client_id in together:
        tensors = {"payload": {"network.weight": torch.full((1, 2), weight)}}
        message = Message(cast("Any", word), {**fields, **given, "client": client_id, **changes}, tensors)
        answer = decode(node.handle(encode(message)))
        assert answer.word == "answer", answer.fields
        assert not answer.fields["metrics"].keys() - {"lr"}
    sums: dict[str, Any] = answer.fields["sums"]
    return sums


def summing(folder: Path, **kwargs: Any) -> Node:
    """A node of four clients: 0 and 2 have a sample each, 1 and 3 have three."""
    make = small(data=lambda: Points(num_clients=4), max_rounds=3, protocols=[ClientTest()])
    (node,) = nodes_of(make, folder, [[0, 1, 2, 3]], report="aggregate", **kwargs)
    return node


def test_a_server_that_asks_one_client_at_a_time_learns_no_clients_metric(tmp_path: Path) -> None:
    """By default one client has no sum, and of overlapping groups with one model the first one has."""
    node = summing(tmp_path)
    with node.at_work():
        assert sums_of(node, [0]) == {}
        assert sums_of(node, [1, 2])["train/loss"][1] == 4  # samples: 3 of client 1 and 1 of client 2
        assert sums_of(node, [1, 2])["train/loss"][1] == 4  # a server that was started again asks again
        assert sums_of(node, [1, 2, 3]) == {}
        assert sums_of(node, [0, 3])["train/loss"][1] == 4
        assert sums_of(node, [1, 2, 3], weight=1.0)["train/loss"][1] == 7  # a round's cohort, with its model


@pytest.mark.parametrize("changes", [{"round": 1}, {"run": "1" * 16}])
def test_another_round_or_run_gives_no_second_sum_of_training(tmp_path: Path, changes: dict[str, Any]) -> None:
    """With one model, the sums over clients 1 and 2, and over these and 3, differ by the loss of client 3."""
    node = summing(tmp_path)
    with node.at_work():
        assert sums_of(node, [1, 2])["train/loss"][1] == 4
        assert sums_of(node, [1, 2, 3], **changes) == {}
    node = summing(tmp_path)  # restarted
    with node.at_work():
        assert sums_of(node, [1, 2, 3], **changes) == {}
        assert sums_of(node, [1, 2], **changes)["train/loss"][1] == 4


def test_evaluations_are_summed_over_one_group_whatever_the_model(tmp_path: Path) -> None:
    """Models that differ in the last bit have losses alike, so that a hash would not tell them from one model."""
    said: list[str] = []
    node = summing(tmp_path, say=said.append)
    with node.at_work():
        assert sums_of(node, [0, 1, 2], "ask")["loss"][1] == 3
        for changes in ({"weight": 1e-7}, {"weight": 1.0, "round": 1}, {"run": "1" * 16}):
            assert sums_of(node, [0, 1, 2, 3], "ask", **changes) == {}
            assert sums_of(node, [1, 2], "ask", **changes) == {}
            assert sums_of(node, [0, 1, 2], "ask", **changes)["loss"][1] == 3, "rounds with changing models"
    node = summing(tmp_path, say=said.append)
    with node.at_work():
        assert sums_of(node, [0, 1, 2, 3], "ask") == {}
        assert sums_of(node, [0, 1, 2], "ask")["loss"][1] == 3
    lines = [line for line in said if "over other clients than before" in line]
    assert len(lines) == 2, "once in a process"
    assert f"{tmp_path / 'node_0' / 'states' / 'sums.pt'} lists the reported sums" in lines[0]


def test_a_sum_that_cannot_be_noted_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = summing(tmp_path)

    def full(*_: Any) -> None:
        raise CheckpointError("no space left")

    with node.at_work(), monkeypatch.context() as patch:
        patch.setattr("lit_fed.federation.node.withheld.write_atomically", full)
        with pytest.raises(AssertionError, match="CheckpointError in lit_fed/federation"):
            sums_of(node, [0, 1])
        with pytest.raises(AssertionError, match="CheckpointError in lit_fed/federation"):
            sums_of(node, [0, 1])
    (tmp_path / "node_0" / "states" / "sums.pt").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"sums\.pt cannot be read .*; restore it, or name a new --state_dir"):
        summing(tmp_path)


@pytest.mark.parametrize("word", ["train", "ask"])
def test_a_sum_of_two_models_is_none(tmp_path: Path, word: Any) -> None:
    """The sums of (client 0 with A, client 1 with B) and of both with A would differ by client 1 alone."""
    node = summing(tmp_path)
    given = {"protocol": "clients", "subset": "test"} if word == "ask" else {}
    fields = {
        "round": 0,
        "run": RUN,
        "boot": node.boot,
        "version": None,
        "drop": [],
        "frozen": {},
        "together": [0, 1],
        **given,
    }
    with node.at_work():
        for client_id in (0, 1):
            tensors = {"payload": {"network.weight": torch.full((1, 2), float(client_id))}}
            answer = decode(node.handle(encode(Message(word, {**fields, "client": client_id}, tensors))))
        assert answer.fields["sums"] == {}


def test_a_failure_makes_no_sum_of_one_client(tmp_path: Path) -> None:
    """The server makes client 0 fail by a payload without its tensor: the sum would be client 1's metrics."""
    (node,) = nodes_of(small(), tmp_path, [[0, 1]], report="aggregate")
    fields = {
        "round": 0,
        "run": "0" * 16,
        "boot": node.boot,
        "version": None,
        "drop": [],
        "frozen": {},
        "together": [0, 1],
    }
    with node.at_work():
        broken = {"payload": {"network.weight": torch.zeros(3)}}
        assert decode(node.handle(encode(Message("train", {**fields, "client": 0}, broken)))).word == "failure"
        good = {"payload": {"network.weight": torch.zeros(1, 2)}}
        assert decode(node.handle(encode(Message("train", {**fields, "client": 1}, good)))).fields["sums"] == {}


@pytest.mark.parametrize("word", ["train", "ask"])
def test_a_failure_that_the_server_makes_gives_no_two_sums(tmp_path: Path, word: str) -> None:
    """Client 3 fails at a payload without its tensor; with it, the sum would differ by client 3 alone."""
    node = summing(tmp_path)
    given = {"protocol": "clients", "subset": "test"} if word == "ask" else {}
    fields = {
        "round": 0,
        "run": RUN,
        "boot": node.boot,
        "version": None,
        "drop": [],
        "frozen": {},
        "together": [0, 1, 3],
        **given,
    }
    told = []
    with node.at_work():
        for last in (torch.zeros(3), torch.zeros(1, 2)):
            for client_id in (0, 1, 3):
                weight = last if client_id == 3 else torch.zeros(1, 2)
                message = Message(
                    cast("Any", word), {**fields, "client": client_id}, {"payload": {"network.weight": weight}}
                )
                answer = decode(node.handle(encode(message)))
            told.append(sorted(answer.fields["sums"]))
    assert told == ([["train/loss"], []] if word == "train" else [[], ["loss"]])


def test_a_node_with_fewer_clients_than_a_sum_needs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--report aggregate sends sums of at least 2 clients, and this node has 1"):
        nodes_of(small(), tmp_path, [[0]], report="aggregate")
    said: list[str] = []
    nodes_of(small(), tmp_path, [[0, 1]], report="aggregate", say=said.append)
    assert said == ["metrics leave this node in sums over at least 2 clients; sums over fewer stay here"]
    with pytest.raises(ConfigError, match="--report_least is 0"):
        nodes_of(small(), tmp_path, [[0, 1]], report="aggregate", report_least=0)


def test_metrics_beside_sums_are_refused(tmp_path: Path) -> None:
    """They would count twice in every mean."""

    def handlers(nodes: list[Node]) -> Any:
        def both(blob: bytes) -> bytes:
            said = decode(nodes[0].handle(blob))
            if decode(blob).word == "train":
                said = replace(said, fields={**said.fields, "metrics": {"train/loss": 1.0}})
            return encode(said)

        return {1: both, 2: nodes[1].handle}

    make = small(on_client_failure="skip", max_rounds=1, data=lambda: Points(num_clients=3))
    made = deploy(make, tmp_path, [[0, 1], [2]], own=AGGREGATE, handlers=handlers)
    (cause,) = {re.sub(r"client \d", "client", one) for one in made.run.failures.causes}
    assert cause == "client sent train/loss, and its node registered to report sums only; it is dropped"


@pytest.mark.parametrize(
    ("sums", "words"),
    [
        ({"a b": [[1.0], 1]}, "a metric named 'a b'"),
        ({"acc": [[1.0], 4]}, "as the sum of acc; run the same"),
        ({"acc": [[1], 1]}, "as the sum of acc; run the same"),
        ({"acc": [[1.0], 0]}, "as the sum of acc; run the same"),
        ({"acc": [[1e300], 1]}, r"1e\+300 as the sum of acc; it must be finite"),
        ({str(place): [[1.0], 1] for place in range(1001)}, "1,001 metrics"),
    ],
)
def test_sums_that_cannot_be_are_refused(sums: Any, words: str) -> None:
    with pytest.raises(WireError, match=words):
        check_sums(sums, "the node of client 0", most=3, trained=False)
    assert check_sums({"acc": [[1.0, 0.5], 3]}, "the node of client 0", most=3, trained=False)["acc"].weight == 3
