"""A node with a key of its own that lies in every field: each lie is its own failure, and the run goes on."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed.errors import ClientFailure, ConfigError
from lit_fed.federation.keys.node_keys import Grant
from lit_fed.federation.messages.wire import Message, decode, encode
from lit_fed.federation.node.node import Node
from lit_fed.federation.server import executor, roster
from lit_fed.federation.server import federate as server
from lit_fed.federation.server.executor import Patience
from lit_fed.federation.server.federate import federate
from lit_fed.federation.server.roster import Gathering
from lit_fed.federation.transport.grid import MemoryGrid
from lit_fed.methods import CalibratedTest, FedAvg, SphereFed
from lit_fed.protocols import ClientTest, GlobalTest, PersonalTest
from tests.federation.support import KeyedGrid, Make, Parts, blob_of, nodes_of, small, written
from tests.methods.frozen_heads.support import digits, model
from tests.support import Points, rows, trainer, weights

Lie = Callable[[Message], Message | bytes]
KEYS = {1: "a1", 2: "b2", 3: "c3"}
NINES = "9" * 5000
RED = "\x1b[31mred\x07"


def fields(**changes: Any) -> Lie:
    """The answer with other fields."""
    return lambda answer: replace(answer, fields={**answer.fields, **changes})


def without(name: str) -> Lie:
    """The answer without a field."""
    return lambda answer: replace(answer, fields={key: value for key, value in answer.fields.items() if key != name})


def payload(**changes: Any) -> Lie:
    """The answer with other tensors."""
    return lambda answer: replace(answer, tensors={"payload": {**answer.tensors.get("payload", {}), **changes}})


def metrics(**changes: Any) -> Lie:
    """The answer with other metrics."""
    return named({name.replace("__", "/"): value for name, value in changes.items()})


def named(changes: Mapping[str, Any]) -> Lie:
    """The answer with other metrics, by their names."""
    return lambda answer: replace(
        answer, fields={**answer.fields, "metrics": {**answer.fields.get("metrics", {}), **changes}}
    )


def failing(**changes: Any) -> Lie:
    """A failure in the place of an answer."""

    def lie(answer: Message) -> Message:
        own = {name: answer.fields[name] for name in ("client", "round")}
        return Message("failure", {**own, "cause": "none", "moved": False, "sums": {}, **changes})

    return lie


W = "network.weight"
ANYWHERE: dict[str, tuple[Lie, str]] = {
    "nothing": (lambda answer: b"", "0 bytes are not a message"),
    "noise": (lambda answer: b"\xff" * 5000, "5000 bytes are not a whole message"),
    "half": (lambda answer: written(answer)[:-3], "cannot be read"),
    "60 MiB of lists": (
        lambda answer: blob_of(b"[]," * 20 * 2**20),
        "and at most 4,194,3.. are expected|exceeds the 4,194,3.. that are due",  # decoded, or frame by frame
    ),
    "3 MiB of lists": (
        lambda answer: blob_of(b"[]," * 2**20),
        "the header of a received message has more than 1,048,576 bytes",
    ),
    "5,000 nines in a name": (named({NINES: 1.0}), "a string of more than 4,096 bytes"),
    "a metric of 400 digits": (metrics(train__loss=10**400), "a number of more than 40 digits"),
    "a deep field": (fields(metrics=[[[[[[[[[]]]]]]]]]), "is nested deeper than 8"),
    "another word": (lambda answer: replace(answer, word="train"), "a message is 'train', and 'answer' is due"),
    "another client": (fields(client=0), "belongs to another message"),
    "an old round": (fields(round=-1), "belongs to another message"),
    "a round of a float": (fields(round=0.0), r"got `float` - at `\$\.round`"),
    "no client": (without("client"), "missing required field `client`"),
    "metrics that are a list": (fields(metrics=[1]), r"got `array` - at `\$\.metrics`"),
    "a metric that is a text": (metrics(train__loss="1"), "sent 1 as train/loss; it must be a finite number"),
    "a metric that is a list": (metrics(train__loss=[1] * 9999), "sent list as train/loss; it must be a finite number"),
    "a metric of 38 digits": (metrics(train__loss=10**38), "sent int as train/loss; it must be a finite number"),
    "a metric of 1e300": (metrics(train__loss=1e300), r"sent 1e\+300 as train/loss; it must be at most 3.4e\+38"),
    "1,001 metrics": (named({f"train/{place}": 1.0 for place in range(1001)}), "sent 1,00. metrics"),
    "a name that colours terminals": (named({f"train/{RED}": 1.0}), "a metric named"),
    "a name that is a formula": (named({"=1+1": 1.0}), "a metric named"),
    "sums that were not announced": (fields(sums={"train/loss": [[1.0], 1]}), "sent sums that were not requested"),
    "sums that are a list": (fields(sums=[1]), r"got `array` - at `\$\.sums`"),
    "another group of tensors": (
        lambda answer: replace(answer, tensors={**answer.tensors, "frozen": {}}),
        "has an unknown group 'frozen'",
    ),
    "a tensor more": (payload(__class__=torch.ones(1)), "holds '__class__'"),
    "a weight of no number": (fields(weight="heavy"), "the weight heavy; it must be a number"),
    "no weight": (without("weight"), "missing required field `weight`"),
    "a negative weight": (fields(weight=-1), "the weight int; it must be a number"),
    "a large weight": (fields(weight=2**53 - 1), "the weight 9.0072e.15, and registered 3 samples"),
    "a failure without a cause": (failing(cause=None), r"got `.*` - at `\$\.cause`"),
    "a failure of a list": (failing(cause=["x"]), r"got `array` - at `\$\.cause`"),
    "a failure that colours terminals": (failing(cause=RED + "\r\n\u202e"), r"\\x1b\[31mred\\x07 \\u202e"),
    "a failure that moves to nowhere": (failing(moved="x"), r"got `str` - at `\$\.moved`"),
    "a failure that always moves": (failing(cause="gone", moved=True), "gone"),
}
"""Lies in answers to training and to tests."""

IN_TRAINING: dict[str, tuple[Lie, str]] = {
    "a weight of 0": (fields(weight=0), "the weight 0, and registered 3 samples"),
    "silence": (fields(silent=True), "sent no update from its training"),
    "no tensors": (lambda answer: replace(answer, tensors={}), f"lacks '{W}'"),
    "NaN": (payload(**{W: torch.full((1, 2), float("nan"))}), "is not finite"),
    "infinity": (payload(**{W: torch.full((1, 2), float("inf"))}), "is not finite"),
    "1e30": (payload(**{W: torch.full((1, 2), 1e30)}), r"exceeds 1e\+18"),
    "another type": (payload(**{W: torch.zeros(1, 2, dtype=torch.float64)}), "float64 of shape"),
    "another shape": (payload(**{W: torch.zeros(2, 1)}), r"of shape \(2, 1\)"),
    "a large shape of nothing": (payload(**{W: torch.zeros(2**40, 0)}), r"of shape \(1099511627776, 0\)"),
    "a metric that is not finite": (metrics(train__loss=float("nan")), "sent nan as train/loss"),
    "the server's metric": (metrics(global__acc=1.0), "sent global/acc as a metric of its training"),
    "the bytes that the server counts": (metrics(uplink_bytes=1.0), "sent uplink_bytes as a metric of its training"),
    "a state of another round": (fields(version=[7, 7]), "is from round 7, in round"),
    "a state of a text": (fields(version="x"), r"got `str` - at `\$\.version`"),
    "a state of no checksum": (fields(version=[0, 2**70]), r"<= 4294967295 - at `\$\.version\[1\]`"),
}


def liar(node: Node, word: str, lie: Lie) -> Callable[[bytes], bytes]:
    """A node that lies where it is told one word."""

    def handle(blob: bytes) -> bytes:
        answer = node.handle(blob)
        if decode(blob).word != word:
            return answer
        said = lie(decode(answer))
        return said if isinstance(said, bytes) else written(said)

    return handle


def run_with(
    folder: Path, make: Make, homes: list[list[int]], word: str, lie: Lie, ckpt_path: str | None = None, **kwargs: Any
) -> Any:
    """Train with a last node that lies; every node has a key, which is its clients' alone."""
    nodes = nodes_of(make, folder, homes, **kwargs.pop("own", {}))
    handlers = {place + 1: node.handle for place, node in enumerate(nodes)}
    handlers[len(nodes)] = liar(nodes[-1], word, lie)
    made, *parts = make(folder)
    bound = {KEYS[place + 1]: Grant(frozenset(clients)) for place, clients in enumerate(homes)}
    with ExitStack() as stack:
        for node in nodes:
            stack.enter_context(node.at_work())
        federate(KeyedGrid(handlers, KEYS), made, *parts, ckpt_path, node_clients=bound, **kwargs)
    return made


@pytest.fixture
def lines(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """What was printed; nothing in it obeys a terminal."""

    def printed() -> str:
        out = "".join(capsys.readouterr())
        assert all(line.isprintable() for line in out.split("\n"))
        return out

    return printed


@pytest.mark.parametrize("lie", [*ANYWHERE, *IN_TRAINING])
def test_a_lie_about_training_is_that_clients_failure(tmp_path: Path, lines: Callable[[], str], lie: str) -> None:
    """Client 0 alone moves w₁ half the way to 2 in each round: 1, then 1.5."""
    said, words = (ANYWHERE | IN_TRAINING)[lie]
    begun = time.process_time()
    made = run_with(tmp_path, small(on_client_failure="skip"), [[0], [1]], "train", said)
    assert weights(made)["network.weight"].tolist() == [[1.5, 0.0]]
    assert made.metrics["participation/failed"] == 1
    assert made.metrics["clients/loss_mean"] == (0.125 + 8) / 2  # ½(1.5 − 2)², ½(0 − 4)²: it tells the truth in tests
    assert time.process_time() - begun < 30
    (first,) = (line for line in lines().split("\n") if "client 1 failed in round 0: " in line)
    assert re.search(words, first), first
    assert all(cell.isprintable() for row in rows(made.log_dir / "clients.csv") for cell in row.values())


@pytest.mark.parametrize("lie", ANYWHERE)
def test_a_lie_about_a_test_leaves_that_client_out(tmp_path: Path, lines: Callable[[], str], lie: str) -> None:
    """Client 0's part of the metric is all there is: w₁ moves as in the simulation."""
    said, words = ANYWHERE[lie]
    made = run_with(tmp_path, small(on_client_failure="skip"), [[0], [1]], "ask", said)
    assert made.metrics["participation/failed"] == 0
    first = weights(made)["network.weight"][0, 0].item()
    assert made.metrics["clients/loss_mean"] == pytest.approx(0.5 * (first - 2) ** 2)
    (line,) = (line for line in lines().split("\n") if "client 1 failed in round 0" in line)
    assert re.search(words, line), line
    assert line.endswith("its clients metrics are missing")


def test_a_lie_ends_a_run_that_tolerates_none(tmp_path: Path) -> None:
    with pytest.raises(ClientFailure, match="client 1 failed in round 0: client 1 sent the weight"):
        run_with(tmp_path, small(), [[0], [1]], "train", fields(weight=5))


def test_sums_are_taken_once_and_over_no_more_samples_than_there_are(tmp_path: Path) -> None:
    """Clients 1 and 3 have 3 samples each: a sum over more than 6 is none."""
    make = small(data=lambda: Points(num_clients=4), on_client_failure="skip")
    for sums in ({"train/x": [[1.0], 7]}, {"train/x": [[1.0], 6]}):
        made = run_with(
            tmp_path / str(sums["train/x"][1]),
            make,
            [[0, 2], [1, 3]],
            "train",
            fields(sums=sums),
            own={"report": "aggregate", "report_least": 1},
        )
        assert made.metrics["participation/failed"] == (2 if sums["train/x"][1] == 7 else 1)


# ---------------------------------------------------------------------- who lives where


def greeting_lie(answer: Message, **changes: Any) -> Message:
    clients = {name: {**report, **changes} for name, report in answer.fields["clients"].items()}
    return replace(answer, fields={**answer.fields, "clients": clients})


def renamed(name: str) -> Lie:
    """The greeting of one client under another name."""
    return lambda answer: fields(clients={name: answer.fields["clients"]["2"]})(answer)


GREETINGS: dict[str, tuple[Lie, str]] = {
    "all clients": (
        lambda answer: replace(
            answer, fields={**answer.fields, "clients": dict.fromkeys("012", answer.fields["clients"]["2"])}
        ),
        "node 3 claims clients 0, 1, and its key is for client 2; correct its --client",
    ),
    "another's client": (
        lambda answer: replace(answer, fields={**answer.fields, "clients": {"0": answer.fields["clients"]["2"]}}),
        "node 3 claims client 0, and its key is for client 2; correct its --client",
    ),
    "a client of 5,000 digits": (fields(clients={NINES: {}}), "a string of more than 4,096 bytes"),
    "a client in other digits": (renamed("٢"), r"a node claims client '\\\\u0662'; clients are 0 to 2"),
    "a client twice": (renamed("02"), "a node claims client '02'; clients are 0 to 2"),
    "clients that are a list": (fields(clients=[2]), r"got `array` - at `\$\.clients`"),
    "a histogram that is too long": (
        lambda answer: greeting_lie(answer, histogram=[0, 0, 1, 0, 0, 0]),
        "client 2 reports 1 samples, and a histogram of 1 samples and 6 classes",
    ),
    "a histogram of other samples": (
        lambda answer: greeting_lie(answer, histogram=[0, 0, 2, 0, 0]),
        "client 2 reports 1 samples, and a histogram of 2 samples and 5 classes",
    ),
    "a histogram of texts": (
        lambda answer: greeting_lie(answer, histogram=["1"]),
        r"got `str` - at `\$\.clients\[...\]\.histogram\[0\]`",
    ),
    "samples of 400 digits": (lambda answer: greeting_lie(answer, samples=10**400), "a number of more than 40 digits"),
    "samples of a float": (
        lambda answer: greeting_lie(answer, samples=1.0),
        r"got `float` - at `\$\.clients\[...\]\.samples`",
    ),
    "a fingerprint of a text": (
        lambda answer: greeting_lie(answer, fingerprint=RED),
        r"matching regex .* - at `\$\.clients\[...\]\.fingerprint`",
    ),
    "a process of another name": (fields(boot=RED), "is malformed"),
    "sums of a number": (fields(sums=1), r"got `int` - at `\$\.sums`"),
    "a refusal that colours terminals": (lambda answer: Message("failure", {"cause": RED}), r"\\x1b\[31mred\\x07"),
    "a refusal without a cause": (lambda answer: Message("failure", {}), "missing required field `cause`"),
    "noise": (lambda answer: b"\xff" * 99, "99 bytes are not a whole message"),
}


@pytest.mark.parametrize("lie", GREETINGS)
def test_a_node_that_lies_about_itself_is_refused_and_may_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: Callable[[], str], lie: str
) -> None:
    """It lies twice, and is then started as it should be: nobody else has noticed, nor is it known by what it said."""
    said, words = GREETINGS[lie]
    monkeypatch.setattr(roster, "_AGAIN_S", (0.02, 0.02))
    left = iter([said, said])
    make = small(data=lambda: Points(num_clients=3))
    made = run_with(tmp_path, make, [[0], [1], [2]], "hello", lambda answer: next(left, lambda one: one)(answer))
    assert made.run.next_round == 2
    refusals = [line for line in lines().split("\n") if " WARNING refused node 3: " in line]
    assert len(refusals) == 1  # the second is the same
    assert re.search(words, refusals[0]), refusals[0]


def test_a_key_that_is_given_to_nobody_is_refused(tmp_path: Path) -> None:
    (one,), (other,) = (nodes_of(small(), tmp_path / str(client), [[client]]) for client in (0, 1))
    made, *parts = small()(tmp_path)
    grid = KeyedGrid({1: one.handle, 2: other.handle}, KEYS)
    words = "no node connected for client 1 within 0.1 s.*refused: the key of node 2 is unknown; enter it"
    with pytest.raises(ConfigError, match=words):
        federate(grid, made, *parts, node_clients={"a1": Grant(frozenset({0}))}, gathering=Gathering(0.1))


def test_a_node_that_is_refused_shuts_nobody_out(tmp_path: Path) -> None:
    """Without keys: a stranger who claims clients 0 and 1 with other data comes late, and nobody is known by it."""

    def stranger(answer: Message) -> Message:
        return greeting_lie(
            replace(
                answer,
                fields={**answer.fields, "clients": {**answer.fields["clients"], "0": answer.fields["clients"]["1"]}},
            ),
            fingerprint="f" * 64,
        )

    one, other, third = (nodes_of(small(), tmp_path / str(place), [[place % 2]])[0] for place in range(3, 6))
    made, *parts = small()(tmp_path)
    grid = MemoryGrid({1: other.handle, 2: liar(one, "hello", stranger), 3: one.handle})
    with ExitStack() as stack:
        for node in (one, other, third):
            stack.enter_context(node.at_work())
        federate(grid, made, *parts)
    assert made.run.next_round == 2


# ---------------------------------------------------------------------- what is held, and kept


HELD: list[Any] = ["x", [1], [["1"]], [["1", -1]], [["1", 2**40]], [["1", True]], [["1", 0]] * 70_000]
HELD += [[["1", 10**400]], [[NINES, 0]]]


@pytest.mark.parametrize(
    "lie",
    [
        *(fields(held=held) for held in HELD),
        lambda answer: b"",
        lambda answer: Message("failure", {"cause": RED}),
        lambda answer: Message("held"),
    ],
)
def test_lies_about_what_is_held_are_left_out(tmp_path: Path, lines: Callable[[], str], lie: Lie) -> None:
    run_with(tmp_path, small(max_rounds=1), [[0], [1]], "none", lie)
    lines()
    made = run_with(tmp_path, small(), [[0], [1]], "held", lie, "last")
    assert made.run.next_round == 2
    assert "the answer of node 2 is dropped: " in lines()


def test_more_versions_than_fit_are_dropped_little_by_little(tmp_path: Path) -> None:
    """It holds 3,000 rounds that nobody has heard of, and is told of a thousand in each message."""
    told: list[int] = []

    def count(node: Node) -> Any:
        def handle(blob: bytes) -> bytes:
            message = decode(blob)
            told.append(len(message.fields.get("drop", [])))
            answer = node.handle(blob)
            if message.word == "held":
                return written(Message("answer", {"held": [["1", at] for at in range(100, 3100)]}))
            return answer

        return handle

    run_with(tmp_path, small(max_rounds=1), [[0], [1]], "none", fields())
    made, *parts = small(max_rounds=3, evaluate_every=0)(tmp_path)
    nodes = nodes_of(small(max_rounds=3, evaluate_every=0), tmp_path, [[0], [1]])
    with ExitStack() as stack:
        for node in nodes:
            stack.enter_context(node.at_work())
        federate(KeyedGrid({1: nodes[0].handle, 2: count(nodes[1])}, KEYS), made, *parts, "last")
    assert made.run.next_round == 3
    assert max(told) <= 1000


@pytest.mark.parametrize("lie", [lambda answer: b"", lambda answer: Message("failure", {"cause": RED})])
def test_a_node_that_does_not_keep_the_end_is_named(tmp_path: Path, lines: Callable[[], str], lie: Lie) -> None:
    run_with(tmp_path, small(), [[0], [1]], "keep", lie)
    assert "the nodes of client 1 did not save the end of the run" in lines()


# ---------------------------------------------------------------------- time


class Hanging(KeyedGrid):
    """Its node 2 takes messages and answers none but greetings."""

    def pull(self, message_ids: Any) -> Any:
        yield from super().pull(
            [one for one in message_ids if self._waiting[one][0] != 2 or decode(self._waiting[one][1]).word == "hello"]
        )


def test_a_node_that_hangs_costs_its_deadline_once_a_round(
    tmp_path: Path, lines: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 rounds of 0.4 s; with three tests a round it would be 6 deadlines more."""
    monkeypatch.setattr(server, "_PARTING_S", 0.1)
    protocols = [GlobalTest(), ClientTest(), PersonalTest(), ClientTest(max_clients=2)]
    protocols[3].name = "again"
    make = small(on_client_failure="skip", protocols=protocols)
    nodes = nodes_of(make, tmp_path, [[0], [1]])
    made, *parts = make(tmp_path)
    with ExitStack() as stack:
        for node in nodes:
            stack.enter_context(node.at_work())
        begun = time.monotonic()
        federate(Hanging({1: nodes[0].handle, 2: nodes[1].handle}, KEYS), made, *parts, patience=Patience(round_s=0.4))
    assert weights(made)["network.weight"].tolist() == [[1.5, 0.0]]
    out = lines()
    assert out.count("its node already missed this round's deadline; its personal metrics are missing") == 1
    assert out.count("its node already missed this round's deadline; its again metrics are missing") == 1
    words = "client 1 failed in round 0: it did not answer within 0.4 s; the run continues"
    assert re.search(rf"^\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d WARNING {words}", out, re.MULTILINE)
    assert re.search(r" WARNING continued without 2 updates of 1 client: 2 × it did not answer", out)
    assert made.run.failures.causes == {"it did not answer within 0.4 s": 2}
    assert 0.8 <= time.monotonic() - begun < 0.8 + 6 * 0.4


def test_a_cohort_of_weight_0_leaves_the_model_as_it_is(tmp_path: Path, lines: Callable[[], str]) -> None:
    """Client 1 has registered no samples, and client 0 fails: the mean of nothing is no end of the run."""
    make = small(on_client_failure="skip", evaluate_every=0, data=lambda: Points(num_clients=3))
    nothing = fields(weight=0)

    def register(answer: Message) -> Message:
        return greeting_lie(answer, samples=0, histogram=[0] * 5)

    nodes = nodes_of(make, tmp_path, [[0, 1, 2]])

    def handle(blob: bytes) -> bytes:
        message, answer = decode(blob), nodes[0].handle(blob)
        if message.word == "hello":
            return written(register(decode(answer)))
        return written(nothing(decode(answer))) if message.word == "train" else answer  # type: ignore[arg-type]

    made, *parts = make(tmp_path)
    with nodes[0].at_work():
        federate(KeyedGrid({1: handle}, KEYS), made, *parts)
    assert made.run.next_round == 2
    assert weights(made)["network.weight"].tolist() == [[0.0, 0.0]]
    assert "round 0 leaves the model unchanged: the weights of this round's updates sum to 0" in lines()


def test_ever_new_metrics_and_causes_are_bounded(
    tmp_path: Path, lines: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each round 400 other names: the third and fourth go beyond 1,000; each round another cause: 20 are told."""
    new = lambda answer: named({f"train/{next(rounds)}_{place}": 1.0 for place in range(400)})(answer)  # noqa: E731
    make = small(on_client_failure="skip", evaluate_every=0, max_rounds=4, logger=False)
    rounds = iter(range(10**6))
    made = run_with(tmp_path / "names", make, [[0], [1]], "train", new)
    assert made.run.failures.causes == {"client 1 sent more than 1,000 distinct metrics; it is dropped": 2}
    lines()
    causes = iter(range(1000))
    make = small(on_client_failure="skip", evaluate_every=0, max_rounds=30)
    made = run_with(
        tmp_path / "causes", make, [[0], [1]], "train", lambda one: failing(cause=f"new {next(causes)}")(one)
    )
    assert len(made.run.failures.causes) == 21
    assert "it keeps giving new causes, after 20 others; check its node" in made.run.failures.causes
    monkeypatch.setattr(executor, "_SAY_S", -1.0)  # the next cause is told after that time
    made = run_with(tmp_path / "later", make, [[0], [1]], "train", lambda one: failing(cause=f"{next(causes)}")(one))
    assert len(made.run.failures.causes) == 30


class Weighing(FedAvg):
    """Its clients weigh a tenth of what they have."""

    heaviest = 1.0

    def finish(self, client: Any) -> Any:
        return replace(super().finish(client), weight=client.num_samples / 10)


def test_a_method_with_weights_of_its_own_declares_the_largest(tmp_path: Path) -> None:
    """w₁ from 1 sample and w₂ from 3: (0.1·1, 0.3·2)/0.4 in the first round; 1.5 is beyond the largest."""
    make = small(algorithm=Weighing, on_client_failure="skip", max_rounds=1)
    made = run_with(tmp_path / "one", make, [[0], [1]], "none", fields())
    assert weights(made)["network.weight"].tolist()[0] == pytest.approx([0.25, 1.5])
    made = run_with(tmp_path / "other", make, [[0], [1]], "train", fields(weight=1.5))
    assert made.run.failures.causes == {"client 1 sent the weight 1.5; it must be at most 1 with this method": 1}


def test_what_is_encoded_is_what_is_written() -> None:
    """The helper of these tests writes what a node would."""
    message = Message("answer", {"client": 1}, {"payload": {"w": torch.ones(2)}})
    assert decode(written(message)).fields == decode(encode(message)).fields


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        (failing(cause="no"), "no client sent the moments of its features"),
        (lambda answer: _zeroed(answer), "the clients' moments do not belong to any features"),
    ],
)
def test_a_protocol_of_which_nothing_is_left_reports_nothing(
    tmp_path: Path, lines: Callable[[], str], lie: Lie, why: str
) -> None:
    """Whoever answers for all clients can spoil what is solved from their answers, and not the run."""

    def make(folder: Path) -> Parts:
        torch.manual_seed(0)
        own = trainer(folder, max_rounds=1, on_client_failure="skip", protocols=[CalibratedTest()])
        return Parts(own, model(), digits(), SphereFed())

    clients = list(range(digits().num_clients))
    made = run_with(tmp_path, make, [clients], "ask", lie)
    assert made.run.next_round == 1
    assert f"there are no metrics calibrated/…: {why}".replace("…", "") in lines().replace("…", "")


def _zeroed(answer: Message) -> Message:
    zero = {name: torch.zeros_like(tensor) for name, tensor in answer.tensors["payload"].items()}
    return replace(answer, tensors={"payload": zero})
