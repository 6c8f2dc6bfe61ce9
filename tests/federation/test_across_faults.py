"""Whatever happens to an end, the run stops or goes on as the simulation knows it, and ends in the same bits."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed.engine.loop.checkpoint import callback_states, read_checkpoint
from lit_fed.engine.storage.chain import ChainReading
from lit_fed.errors import ClientFailure, ConfigError, NobodyLeft
from lit_fed.federation.audit import NAME, Audit
from lit_fed.federation.keys.node_keys import Grant
from lit_fed.federation.messages.wire import PROTOCOL, Message, decode, encode
from lit_fed.federation.node.audited import AuditedNode
from lit_fed.federation.node.node import Node
from lit_fed.federation.server.executor import Patience
from lit_fed.federation.server.federate import federate
from lit_fed.federation.server.roster import Gathering
from lit_fed.federation.transport.grid import MemoryGrid, Reply
from lit_fed.methods import FedAvg, Scaffold
from lit_fed.participation import UniformParticipation
from lit_fed.privacy import ClientLevel
from tests.federation.support import KeyedGrid, Make, Parts, assert_same_states, deploy, nodes_of, simulate, small
from tests.support import Points, Unlucky, Wanderer, Wandering, assert_same, rows, trainer, weights

HOMES = [[0, 3], [1], [2, 4]]


def wanderers(algorithm: Any = Wandering, **kwargs: Any) -> Make:
    settings: dict[str, Any] = {"max_rounds": 3, "participation": UniformParticipation(count=3)} | kwargs

    def make(folder: Path) -> Parts:
        torch.manual_seed(0)
        return Parts(trainer(folder, **settings), Wanderer(), Points(num_clients=5, sizes=(2, 3)), algorithm())

    return make


class Killed(BaseException):
    """The server is gone, without a word."""


class Killing(MemoryGrid):
    """Kills an end when a message comes by: a node before its work or after it, or the server.

    Args:
        nodes: The nodes.
        who: ``node before``, ``node after`` or ``server``.
        at: The message.
    """

    def __init__(self, nodes: Sequence[AuditedNode], who: str, at: int) -> None:
        super().__init__({place + 1: node.handle for place, node in enumerate(nodes)})
        self.who, self.at, self.done = who, at, 0

    def pull(self, message_ids: Collection[str]) -> Iterator[Reply]:
        for message_id in list(message_ids)[:1]:
            self.done += 1
            node = self._waiting[message_id][0]
            if self.done != self.at:
                yield from super().pull([message_id])
                return
            if self.who == "server":
                raise Killed
            if self.who == "node after":  # it has put its state away, and its answer is lost
                list(super().pull([message_id]))
                self._waiting[message_id] = node, b""
            del self.handlers[node]
            yield from super().pull([message_id])


def attempt(make: Make, folder: Path, who: str, at: int, ckpt_path: str | None) -> Any:
    """Run on nodes of their own, which find the states and logs that the nodes before them left."""
    nodes = nodes_of(make, folder, HOMES)
    made, *parts = make(folder)
    *logs, log = [Audit(place, None) for place in log_folders(folder)]
    audited = [AuditedNode(node, of_node) for node, of_node in zip(nodes, logs, strict=True)]
    with ExitStack() as stack:
        for node in nodes if who != "nobody" else audited:  # an audited node's end is a line that a kill prevents
            stack.enter_context(node.at_work())
        federate(Killing(audited, who, at), made, *parts, ckpt_path, audit=log)
    return made


def log_folders(folder: Path) -> list[Path]:
    """The folders of the nodes' logs, and of the server's."""
    folders = [folder / f"node_{place}" / "audit" for place in range(len(HOMES))] + [folder / "audit"]
    for place in folders:
        place.mkdir(parents=True, exist_ok=True)
    return folders


def tear(logs: Iterable[Path], seed: int) -> set[Path]:
    """Cut a part of each log's last line off, as a kill may; return the logs with a torn line."""
    torn, generator = set(), random.Random(seed)
    for path in logs:
        if path.exists():
            *before, last = path.read_bytes().splitlines(keepends=True)
            kept = generator.randrange(len(last))
            path.write_bytes(b"".join(before) + last[:kept])
            torn |= {path} if 0 < kept < len(last) - 1 else set()
    return torn


random.seed(17)
KILLS = [(who, random.randint(4, 3 + 3 * 8)) for who in ("server", "node before", "node after") for _ in range(11)]
"""After 3 greetings, each of 3 rounds has 3 messages to train and 5 to test: 24 in all."""


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return {
        name: simulate(wanderers(algorithm), tmp_path_factory.mktemp(name))
        for name, algorithm in (("scaffold", Scaffold), ("wandering", Wandering))
    }


@pytest.mark.parametrize(
    ("name", "algorithm", "who", "at"),
    [  # every place soon with one of the methods, and with the other one later
        pytest.param(*method, *kill, marks=[pytest.mark.long] if (place + turn) % 2 else [])
        for turn, method in enumerate((("scaffold", Scaffold), ("wandering", Wandering)))
        for place, kill in enumerate(sorted(set(KILLS)))
    ],
)
def test_killed_anywhere_and_resumed_is_uninterrupted(
    tmp_path: Path, simulated: Any, name: str, algorithm: Any, who: str, at: int
) -> None:
    make = wanderers(algorithm)
    with pytest.raises(Killed if who == "server" else ClientFailure):
        attempt(make, tmp_path, who, at, None)
    logs = [place / NAME for place in log_folders(tmp_path)]
    torn = tear(logs, at)
    made = attempt(make, tmp_path, "nobody", 0, "last")
    for path in logs:
        reading = ChainReading(path)
        rounds = [line.get("round") for _, line in reading if line["event"] in ("round", "answered")]
        assert reading.faults == []
        assert len(reading.torn) == (path in torn)
        assert rounds[-1] == 2
    assert_same(weights(made), weights(simulated[name]))
    assert_same_states(made, tmp_path, simulated[name].run.federation.store.state_dict())


def test_a_client_that_raises_is_named_with_its_cause(tmp_path: Path) -> None:
    make = small(data=lambda: Points(num_clients=9), algorithm=Unlucky)
    words = (
        r"client 7 failed in round 0: OSError in lit_fed/engine/\w+/\w+.py, line \d+ "
        r"\(error 1 in the log of its node\)"
    )
    with pytest.raises(ClientFailure, match=words):
        deploy(make, tmp_path, [[0, 1, 2, 3, 4], [5, 6, 7, 8]])
    log = (tmp_path / "node_1" / "states" / "node.log").read_text()
    assert "error 1: client 7 failed in round 0: OSError: its camera broke\n" in log
    assert "Traceback" in log


def test_a_client_that_raises_is_passed_over_as_in_a_simulation(tmp_path: Path) -> None:
    make = small(data=lambda: Points(num_clients=9), algorithm=Unlucky, on_client_failure="skip")
    one, other = simulate(make, tmp_path / "one"), deploy(make, tmp_path / "other", [[0, 1, 2, 3, 4], [5, 6, 7, 8]])
    assert_same(weights(one), weights(other))
    assert other.metrics["participation/failed"] == one.metrics["participation/failed"] == 1
    assert list(one.run.failures.causes.values()) == list(other.run.failures.causes.values()) == [2]


class Silent(MemoryGrid):
    """Never gives back what one node has to say of its training."""

    silent = 2

    def pull(self, message_ids: Collection[str]) -> Iterator[Reply]:
        told = [one for one in message_ids if not self._keeps(*self._waiting[one])]
        yield from super().pull(told)

    def _keeps(self, node: int, blob: bytes) -> bool:
        return node == self.silent and decode(blob).word == "train"


def with_grid(grid_of: Any, make: Make, folder: Path, homes: Any, **kwargs: Any) -> Any:
    nodes = nodes_of(make, folder, homes)
    made, *parts = make(folder)
    with ExitStack() as stack:
        for node in nodes:
            stack.enter_context(node.at_work())
        federate(grid_of({place + 1: node.handle for place, node in enumerate(nodes)}), made, *parts, **kwargs)
    return made


def test_who_is_too_late_has_failed_and_stops_nobody(tmp_path: Path) -> None:
    """Client 0 alone moves w from (0, 0) to (1, 0) in the first round: half the way to 2."""
    make = small(max_rounds=1, on_client_failure="skip")
    made = with_grid(Silent, make, tmp_path, [[0], [1]], patience=Patience(round_s=0.3))
    assert made.run.failures.causes == {"it did not answer within 0.3 s": 1}
    assert weights(made)["network.weight"].tolist() == [[1.0, 0.0]]
    stages = {
        (row["client_id"], row["metric"]) for row in rows(made.log_dir / "clients.csv") if row["stage"] == "train"
    }
    assert ("1", "uplink_bytes") not in stages
    assert ("0", "uplink_bytes") in stages


def test_a_cohort_that_is_too_small_stops_the_run(tmp_path: Path) -> None:
    make = small(max_rounds=1, on_client_failure="skip")
    words = r"round 0 has answers from 1 of 2 clients, and the smallest cohort is 2; raise the time-out, or"
    with pytest.raises(NobodyLeft, match=words):
        with_grid(Silent, make, tmp_path, [[0], [1]], patience=Patience(round_s=0.3, smallest_cohort=2))


@pytest.mark.parametrize("wrong", [{"round_s": 0}, {"return_s": -1}, {"smallest_cohort": -1}])
def test_patience_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"--patience\.\w+ is -?[01]; it must be (at least|above) 0"):
        Patience(**wrong)


class Restarting(MemoryGrid):
    """Starts a node again, in its folder, before some message."""

    at: int
    again: Any

    def pull(self, message_ids: Collection[str]) -> Iterator[Reply]:
        for message_id in list(message_ids)[:1]:
            type(self).at -= 1
            if not type(self).at:
                self.handlers[1] = self.again()
            yield from super().pull([message_id])


@pytest.mark.parametrize("at", [5, 9, 14, 20])
def test_a_node_that_was_started_again_is_the_same_clients(tmp_path: Path, at: int) -> None:
    """Its messages under way are not for it any more, and sent again once it has said who lives there."""
    make, stack = wanderers(), ExitStack()

    def again() -> Any:
        (node,) = nodes_of(make, tmp_path, HOMES[:1])
        return stack.enter_context(node.at_work()).handle

    grid = type("Once", (Restarting,), {"at": at, "again": staticmethod(again)})
    with stack:
        made = with_grid(grid, make, tmp_path, HOMES)
    assert_same(weights(made), weights(simulate(make, tmp_path / "one")))


# ---------------------------------------------------------------------- who is who


def test_two_nodes_that_claim_one_client_are_named(tmp_path: Path) -> None:
    words = (
        r"no node connected for client 4 within 0.2 s; .*refused: nodes 1 and 3 both claim client 0; stop one of them"
    )
    with pytest.raises(ConfigError, match=words):
        deploy(wanderers(), tmp_path, [[0, 1], [2, 3], [0, 4]], gathering=Gathering(0.2))


def test_a_client_that_nobody_is_is_missed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no node connected for client 1, 3 within"):
        deploy(wanderers(), tmp_path, [[0, 2], [4]], gathering=Gathering(0.2))


class Other(Points):
    """Client 0 has another data set than before."""

    def fingerprint_of(self, client_id: int) -> str:
        return super().fingerprint_of(client_id)[::-1] if client_id == 0 else super().fingerprint_of(client_id)


def test_a_client_with_other_data_than_before_is_refused(tmp_path: Path) -> None:
    deploy(small(), tmp_path, [[0], [1]])
    words = "client 0 within 0.3 s.*refused: client 0 has different data than before; restore its data, or start a new"
    with pytest.raises(ConfigError, match=words):
        deploy(small(data=Other, max_rounds=3), tmp_path, [[0], [1]], ckpt_path="last", gathering=Gathering(0.3))


def test_a_client_with_other_data_is_refused_alone_where_fewer_clients_suffice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other client goes on; the server knows the refused client's samples from its checkpoint."""
    deploy(small(), tmp_path, [[0], [1]])
    other = small(data=Other, max_rounds=3, on_client_failure="skip")
    made = deploy(other, tmp_path, [[0], [1]], ckpt_path="last", gathering=Gathering(0.3, least=1))
    assert made.run.next_round == 3
    assert made.run.failures.causes == {"its node is not connected; restart it": 1}
    assert "the run goes on without client 0, 1 of 2 clients; refused: client 0 has different data" in (
        capsys.readouterr().out
    )
    with pytest.raises(ConfigError, match="no node connected for client 1"):  # a new run knows nobody
        deploy(small(), tmp_path / "new", [[0]], gathering=Gathering(0.2, least=1))


@pytest.mark.parametrize(("wrong", "words"), [({"wait_s": -1}, "wait_s is -1"), ({"least": 0}, "least is 0")])
def test_a_gathering_that_cannot_be(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"--gathering.{words}"):
        Gathering(**wrong)


def test_the_number_of_samples_is_held_over_a_servers_restart(tmp_path: Path) -> None:
    """Client 1 says 2**52 samples to a server that was started again: its weight would be the whole mean's."""
    deploy(small(), tmp_path, [[0], [1]])

    def handlers(nodes: list[Node]) -> Any:
        def heavy(blob: bytes) -> bytes:
            said = decode(nodes[1].handle(blob))
            if decode(blob).word != "hello":
                return encode(said)
            report = said.fields["clients"]["1"] | {"samples": 2**52, "histogram": [0, 0, 0, 0, 2**52]}
            return encode(replace(said, fields={**said.fields, "clients": {"1": report}}))

        return {1: nodes[0].handle, 2: heavy}

    more = small(max_rounds=3)
    words = "refused: client 1 reports different numbers of samples than before; start a new run"
    with pytest.raises(ConfigError, match=words):
        deploy(more, tmp_path, [[0], [1]], ckpt_path="last", handlers=handlers, gathering=Gathering(0.3))


def test_a_replaced_key_goes_on_with_the_run(tmp_path: Path) -> None:
    """The key file is the word of who is whom: site 2 has a new key in it, for the same client."""
    for at, (key, ckpt_path) in enumerate([("b2", None), ("c3", "last")]):
        make = small(max_rounds=2 + at)
        nodes = nodes_of(make, tmp_path, [[0], [1]])
        made, *parts = make(tmp_path)
        with ExitStack() as stack:
            for node in nodes:
                stack.enter_context(node.at_work())
            grid = KeyedGrid({1: nodes[0].handle, 2: nodes[1].handle}, {1: "a1", 2: key})
            bound = {"a1": Grant(frozenset({0})), key: Grant(frozenset({1}))}
            federate(grid, made, *parts, ckpt_path, node_clients=bound)
    assert made.run.next_round == 3


def answering(node: Node, **changes: Any) -> Any:
    """A node whose greeting is not what it should be."""

    def handle(blob: bytes) -> bytes:
        answer = decode(node.handle(blob))
        if decode(blob).word == "hello":
            return encode(replace(answer, fields={**answer.fields, **changes}))
        return encode(answer)

    return handle


REPORT = {"samples": 3, "histogram": None, "fingerprint": "0" * 64, "scale": None}


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        ({"7": REPORT}, "a node claims client '7'; clients are 0 to 1"),
        ({"../x": REPORT}, "a node claims client '../x'; clients are 0 to 1"),
        ({}, "a node has no clients; start it with client"),
        ({"1": {**REPORT, "samples": -1}}, r"samples`"),
        ({"1": {**REPORT, "histogram": ["a"]}}, r"histogram\[0\]`"),
        ({"1": {**REPORT, "fingerprint": "x"}}, "fingerprint`"),
        ({"1": {**REPORT, "scale": "x"}}, "scale`"),
    ],
)
def test_greetings_that_cannot_be_are_refused(tmp_path: Path, clients: Any, words: str) -> None:
    def handlers(nodes: list[Node]) -> Any:
        return {1: nodes[0].handle, 2: answering(nodes[1], clients=clients)}

    with pytest.raises(ConfigError, match=f"no node connected for client 1 within 0.2 s.*{words}"):
        deploy(small(), tmp_path, [[0], [1]], handlers=handlers, gathering=Gathering(0.2))


# ---------------------------------------------------------------------- what ends were told


def greeted(node: Node, **changes: Any) -> str:
    fields: dict[str, Any] = {"protocol": PROTOCOL, "version": "0.1.0", "settings": {}, "config": "", **changes}
    answer = decode(node.handle(encode(Message("hello", fields))))
    return str(answer.fields.get("cause"))


def test_another_version_or_configuration_is_told_in_a_line(tmp_path: Path) -> None:
    said: list[str] = []
    (node,) = nodes_of(small(), tmp_path, [[0]], say=said.append)
    node.settings = {"algorithm.class_path": '"FedAvg"', "trainer.seed": "0"}
    assert greeted(node, version="9.9") == "the node runs lit_fed 0.1.0 and the server 9.9; install the same version"
    assert greeted(node, settings={"algorithm.class_path": '"FedAvg"', "trainer.seed": "1"}) == (
        "trainer.seed is 0 on the node and 1 on the server; use the same configuration on both ends"
    )
    assert greeted(node, settings=node.settings) == "None"
    assert len(said) == 3
    assert said[2].endswith("registered with the server")
    assert said[0].startswith("refused the server: the node runs")


def test_a_server_cannot_lead_a_node_out_of_its_folder(tmp_path: Path) -> None:
    (node,) = nodes_of(small(), tmp_path, [[0]])
    for run in ("../../elsewhere", "", "0123456789abcdef/x", "0123456789ABCDEF"):
        fields = {"client": 0, "round": 0, "run": run, "boot": node.boot, "version": None, "drop": [], "together": [0]}
        answer = decode(node.handle(encode(Message("train", fields | {"frozen": {}}))))
        assert answer.word == "failure"
        assert "is malformed; run the same lit_fed" in str(answer.fields["cause"])
    assert not (tmp_path / "elsewhere").exists()


def test_a_node_answers_whatever_it_is_told(tmp_path: Path) -> None:
    """Bytes from anybody, and messages that make no sense, are a failure in a line; the node works on."""
    (node,) = nodes_of(small(), tmp_path, [[0]])
    good: dict[str, Any] = {"client": 0, "round": 0, "run": "0" * 16, "boot": node.boot, "version": None, "drop": []}
    good |= {"together": [0], "frozen": {}}
    blobs = [b"", b"x" * 99, encode(Message("hello")), encode(Message("held")), encode(Message("answer", good))]
    changes = [{"round": -1}, {"client": 1}, {"version": [1]}, {"drop": 3}, {"round": 2**70}, {"version": [5, 5]}]
    blobs += [encode(Message("train", {**good, **change})) for change in changes]
    blobs += [encode(Message("train", good, {"payload": {"os.system": torch.zeros(1)}}))]
    blobs += [encode(Message("ask", {**good, "protocol": "os.system", "subset": "test"}))]
    with node.at_work():
        for blob in blobs:
            answer = decode(node.handle(blob))
            assert answer.word == "failure", blob
            assert "\n" not in str(answer.fields["cause"])


def test_states_that_nobody_needs_are_deleted_where_they_lie(tmp_path: Path) -> None:
    """One version of each client's state for the last checkpoint, and for the best."""
    made = deploy(wanderers(max_rounds=6), tmp_path, HOMES)
    index = made.run.federation.store.state_dict()
    for place, clients in enumerate(HOMES):
        for client in clients:
            files = list((tmp_path / f"node_{place}" / "states").rglob(f"{client}.r*.states"))
            assert any(path.name == f"{client}.r{index[str(client)][0]}.states" for path in files)
            assert len(files) <= 3


def test_the_server_has_no_clients_state(tmp_path: Path) -> None:
    made = deploy(wanderers(), tmp_path / "other", HOMES)
    assert not list(made.log_dir.rglob("*.r[0-9]*"))
    assert list(simulate(wanderers(), tmp_path / "one").log_dir.rglob("*.r[0-9]*.states"))


@pytest.mark.parametrize(("value", "mean"), [(float("nan"), 1.0), (-1e30, 1.0), (250.0, 1.0), (70.0, 24.0)])
def test_one_clients_odd_metric_does_not_decide_a_mean(tmp_path: Path, value: float, mean: float) -> None:
    """Losses 1, 1 and an odd one: the mean of the others; within 100 times the median, (1 + 1 + 70) / 3 = 24."""

    def handlers(nodes: list[Node]) -> Any:
        def told(place: int) -> Any:
            def handle(blob: bytes) -> bytes:
                said = decode(nodes[place].handle(blob))
                if decode(blob).word != "ask":
                    return encode(said)
                metrics = dict.fromkeys(said.fields["metrics"], value if place == 2 else 1.0)
                return encode(replace(said, fields={**said.fields, "metrics": metrics}))

            return handle

        return {place + 1: told(place) for place in range(3)}

    made = deploy(small(data=lambda: Points(num_clients=3)), tmp_path, [[0], [1], [2]], handlers=handlers)
    assert made.metrics["clients/loss_mean"] == mean
    assert made.metrics.get("clients/loss_missing", 0) == (mean == 1)  # whoever is left out is counted
    assert (made.log_dir / "checkpoints" / "best.ckpt").is_file()


def test_a_private_federations_checkpoint_holds_no_clients_report(tmp_path: Path) -> None:
    """The reports lie beside the clients' states, and a server that was started again still holds nodes to them."""
    pytest.importorskip("dp_accounting")

    def make(rounds: int, data: Any = Points) -> Make:
        key = {"privacy": ClientLevel(0.5, 1.0, delta=0.01, key_file=str(tmp_path / "run.key"))}
        settings = {**key, "max_rounds": rounds, "on_client_failure": "skip"}
        return small(data=data, algorithm=lambda: FedAvg(weighting="uniform"), **settings)

    made = deploy(make(2), tmp_path, [[0], [1]])
    path = made.log_dir / "checkpoints" / "last.ckpt"
    content = read_checkpoint(path)
    assert "Identity" not in content["callbacks"]
    assert callback_states(content, path)["Identity"]["known"]["1"]["samples"] == 3
    assert deploy(make(3), tmp_path, [[0], [1]], ckpt_path="last").run.next_round == 3
    with pytest.raises(ConfigError, match="client 0 has different data than before"):
        deploy(make(4, Other), tmp_path, [[0], [1]], ckpt_path="last", gathering=Gathering(0.3))
