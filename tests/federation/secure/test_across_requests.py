"""What a node gives to sums follows from what the server said, from settings, and from noise; never from its data."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lit_fed import __version__
from lit_fed.callbacks import Callback
from lit_fed.errors import ConfigError, LitFedError, WireError
from lit_fed.federation.messages.wire import PROTOCOL, Message, decode, encode
from lit_fed.federation.node.node import Node
from lit_fed.federation.secure.messages import Invitation, TooFew
from lit_fed.federation.secure.packed import about, pack
from lit_fed.federation.secure.signer import Signer
from lit_fed.federation.secure.sum_log import LoggedRound, SumLog
from lit_fed.federation.server.answers import greeting
from lit_fed.federation.server.federate import federate
from lit_fed.methods import FedAvg, Scaffold
from lit_fed.participation import (
    FullParticipation,
    Participant,
    Participation,
    PoissonParticipation,
    UniformParticipation,
)
from lit_fed.privacy import SecureSum
from lit_fed.protocols import ClientTest
from lit_fed.tensors import hash_of_groups
from tests.federation.secure.nodes import HOMES, Killed, Watched, is_at, keyed, killed_in_evaluation_of, make, run
from tests.federation.secure.test_across_noise import HOMES as OF_NOISE
from tests.federation.secure.test_across_noise import lines, noisy, privacy_of
from tests.federation.support import Make, nodes_of, simulate
from tests.support import LeastSquares, assert_same, rows, weights

W = "network.weight"
RUN = "0" * 16
ABOUT_X = {W: torch.tensor([[0.25, 0.0]])}
ABOUT_Y = {W: torch.tensor([[0.25, 0.5]])}
"""Clients 0, 2 and 4 look at the first weight only: of both models their updates are equal."""


def asked(node: Node, client_id: int, payload: Mapping[str, Tensor], word: Any = "train", **more: Any) -> Message:
    """A node's answer to a request for a client's work."""
    fields = {"client": client_id, "round": 0, "run": RUN, "boot": node.boot, "version": None, "drop": [], "frozen": {}}
    return decode(node.handle(encode(Message(word, fields | {"together": [client_id]} | more, {"payload": payload}))))


def called(node: Node, clients: list[int], payload: Mapping[str, Tensor], attempt: int, **more: Any) -> Message:
    """A node's answer to a call for a sum of noisy updates, with two nodes that the server made up."""
    own: Any = node.sums
    signers = {signer.name: signer for signer in (own.signer, Signer(), Signer())}
    noise = own.summed.noise
    what = about(hash_of_groups({"payload": payload, "frozen": {}}), 2, noise.grid, ())
    run_id, round_idx = more.get("run", RUN), more.get("round", 0)
    call = Invitation(f"{run_id}/train//", round_idx, attempt, tuple(sorted(signers)), 3, 5, what, None)
    fields = {
        "run": run_id, "work": "train", "protocol": "", "subset": "", "round": round_idx, "clients": clients,
        "stage": "keys", "call": pack(call)[0], "names": [], "grid": noise.grid, "deviation": noise.deviation,
        "nodes": {name: signer.public.hex() for name, signer in signers.items()},
    }  # fmt: skip
    return decode(node.handle(encode(Message("secure", fields))))


def given(node: Node) -> list[int]:
    """The vector that a node is about to mask."""
    own: Any = node.sums
    words: list[int] = own.party._attempt.words.tolist()
    return words


@pytest.fixture
def at_work() -> Any:
    with ExitStack() as stack:

        def started(parts: Make, folder: Path, homes: Any = OF_NOISE, **own: Any) -> list[Node]:
            return [stack.enter_context(node.at_work()) for node in nodes_of(parts, folder, homes, **own)]

        yield started


# ---------------------------------------------------------------------- noise of nodes


@pytest.mark.parametrize("place", [0, 1], ids=["the sum is the same", "the sum is another"])
@pytest.mark.parametrize("restarted", [False, True])
def test_another_model_in_a_round_that_got_noise_is_refused_whatever_the_sum(
    tmp_path: Path, at_work: Any, place: int, restarted: bool
) -> None:
    """A server that tells answers from refusals learns which client is there: node 0 has clients 0 and 4."""
    pytest.importorskip("dp_accounting")
    clients, node = OF_NOISE[place], at_work(noisy(), tmp_path)[place]
    for client_id in clients:
        asked(node, client_id, ABOUT_X)
    assert called(node, clients, ABOUT_X, 1).word == "answer"
    if restarted:
        node = at_work(noisy(), tmp_path)[place]
    for client_id in clients:
        asked(node, client_id, ABOUT_Y)
    for more, listed in (({}, clients), ({}, []), ({"run": "1" * 16}, [])):
        answer = called(node, listed, ABOUT_Y, 2, **more)
        assert answer.fields["cause"] in (
            "round 0 got this node's vector before, for another model, clients or metrics; a second sum would tell of "
            "single nodes",
            "round 0 got this node's noise before, for another request or run, or the noisy sum is lost; a second sum "
            "would tell of single nodes",
        )
        assert ("vector" in answer.fields["cause"]) == (not more)


def with_other_data(node: Node) -> Node:
    """The node, whose clients' updates come out differently from now on."""
    train = node._train

    def changed(client_id: int, broadcast: Any) -> Any:
        update: Any = train(client_id, broadcast)
        update.payload = {name: tensor + 0.125 for name, tensor in update.payload.items()}
        return update

    node._train = changed  # type: ignore[method-assign]
    return node


@pytest.mark.parametrize("lost", [False, True])
def test_a_request_gets_its_noisy_answer_again_whatever_the_data_are_now(
    tmp_path: Path, at_work: Any, lost: bool
) -> None:
    """The site's data change between two equal requests; a node that lost its answer says the same of either data."""
    pytest.importorskip("dp_accounting")
    node = at_work(noisy(), tmp_path)[0]
    for client_id in (0, 4):
        asked(node, client_id, ABOUT_X)
    assert called(node, [0, 4], ABOUT_X, 1).word == "answer"
    before, charged, said = given(node), lines(tmp_path), set()
    if lost:
        shutil.rmtree(tmp_path / "node_0" / "states" / "sums")
    again = at_work(noisy(), tmp_path)[0]
    nodes = [again] if lost else [again, node]
    for place, one in enumerate([*nodes, *map(with_other_data, nodes)]):
        for client_id in (0, 4):
            asked(one, client_id, ABOUT_X)
        answer = called(one, [0, 4], ABOUT_X, 2 + place)
        said.add(answer.fields.get("cause"))
        assert lost or given(one) == before
    assert lines(tmp_path) == charged
    assert len(said) == 1
    assert ("or the noisy sum is lost" in str(said)) == lost


def test_a_node_killed_before_it_charged_its_account_gives_the_same_answer_and_charges_it_once(
    tmp_path: Path, at_work: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("dp_accounting")
    node = at_work(noisy(), tmp_path)[1]
    asked(node, 1, ABOUT_X)
    with monkeypatch.context() as patch:
        patch.setattr(privacy_of(node), "charge", lambda *_: 1 / 0)
        assert called(node, [1], ABOUT_X, 1).word == "failure"
    assert lines(tmp_path)["node_1"] == []
    (kept,) = (tmp_path / "node_1" / "states" / "sums").glob("*.words")
    again = with_other_data(at_work(noisy(), tmp_path)[1])
    for attempt in (2, 3):
        asked(again, 1, ABOUT_X)
        assert called(again, [1], ABOUT_X, attempt).word == "answer"
        assert given(again) == torch.load(kept, weights_only=True)[-1].view(torch.uint64).tolist()
    assert len(lines(tmp_path)["node_1"]) == 1


class Failing(Scaffold):
    """Client 0 fails where it is told to."""

    fails = False

    def objective(self, client: Any, batch: Any) -> Any:
        if self.fails and client.id == 0:
            raise RuntimeError("a row of its data")
        return super().objective(client, batch)


def test_beside_noise_a_clients_failure_is_an_update_by_zeros_that_looks_like_any_other(
    tmp_path: Path, at_work: Any
) -> None:
    """Equal bytes of both answers, in the next round too, which goes on from the state of either."""
    pytest.importorskip("dp_accounting")
    model = {name: torch.zeros(1, 2) for name in (W, f"control.{W}")}
    said, moved = [], []
    for fails in (False, True):
        parts = noisy(method=lambda fails=fails: _failing(fails))
        node = at_work(parts, tmp_path / str(fails))[0]
        first = asked(node, 0, model)
        own: Any = node.sums
        moved.append(any(not torch.equal(tensor, torch.zeros(1, 2)) for tensor in own._updates[0].payload.values()))
        second = asked(node, 0, model, round=1, version=first.fields["version"])
        assert first.fields["version"] is not None
        said.append([{**answer.fields, "word": answer.word} for answer in (first, second)])
    assert said[0] == said[1]
    assert said[0][0]["word"] == "answer"
    assert moved == [True, False]


def _failing(fails: bool) -> Failing:
    made = Failing()
    made.fails = fails
    return made


# ---------------------------------------------------------------------- versions


class Steeper(LeastSquares):
    """Trains as on other data."""

    def loss(self, batch: Any) -> Tensor:
        return 2 * super().loss(batch)


@pytest.mark.parametrize("summed", [False, True])
def test_a_version_is_of_the_request_and_not_of_the_state(tmp_path: Path, at_work: Any, summed: bool) -> None:
    """States of other data have equal versions; another model, client, round or earlier version has another one."""
    settings = {} if summed else {"secure_sum": None}
    parts = [make(Scaffold, module=module, **settings) for module in (LeastSquares, Steeper)]
    node, other = (at_work(one, tmp_path / str(place), [[0, 1]])[0] for place, one in enumerate(parts))
    model, another = ({name: torch.full((1, 2), at) for name in (W, f"control.{W}")} for at in (0.0, 0.25))
    numbers = []
    for client_id, payload in ((0, model), (0, another), (1, model)):
        found = [asked(one, client_id, payload).fields["version"] for one in (node, other)]
        assert found[0] == found[1]
        numbers.append(found[0][1])
    first = asked(node, 0, model).fields["version"]
    assert first[1] == numbers[0]
    numbers += [asked(node, 0, model, round=1, version=at).fields["version"][1] for at in (first, None)]
    assert len(set(numbers)) == 5
    states = [one.federation.store.files.read("1", (0, numbers[2])) for one in (node, other)]
    assert any(not torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_state_of_another_request_for_the_round_is_not_taken(tmp_path: Path, at_work: Any) -> None:
    (node,) = at_work(make(Scaffold, secure_sum=None, max_rounds=3), tmp_path, [[0]])
    model, another = ({name: torch.full((1, 2), at) for name in (W, f"control.{W}")} for at in (0.0, 0.25))
    first = asked(node, 0, model).fields["version"]
    asked(node, 0, another)
    assert asked(node, 0, model, round=1, version=first).word == "failure"
    asked(node, 0, model)
    assert asked(node, 0, model, round=1, version=first).word == "answer"


# ---------------------------------------------------------------------- whose answers are summed


def listed(of: Callable[[int], list[int]], work: str = "train") -> Callable[[int, Message], Message]:
    """A server that has other clients summed than those that it trained."""

    def change(node: int, message: Message) -> Message:
        if not any(is_at(message, stage, work, at) for stage in ("offer", "keys") for at in (0, 1)):
            return message
        return Message("secure", {**message.fields, "clients": of(node)}, message.tensors)

    return change


@pytest.fixture
def hostile(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server takes any sum that it gets."""
    monkeypatch.setattr("lit_fed.federation.server.summing.Summing._smallest", lambda _: 0)


def unmasked(grid: Watched) -> list[Message]:
    return [answer for _, _, answer in grid.crossed if "seeds" in answer.fields.get("message", {})]


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize("work", ["train", "ask"])
@pytest.mark.parametrize("target", [0, 2])
def test_one_clients_answer_is_no_sum(tmp_path: Path, work: str, target: int) -> None:
    """Its list to one node, and empty lists to the others, gave the client's update, weight and loss to the bit."""
    settings, grids = {"protocols": [ClientTest()], "max_rounds": 1}, list[Watched]()
    alone = listed(lambda node: [target] if target in HOMES[node - 1] else [], work)
    with pytest.raises(TooFew, match="0 of 4 nodes are left for masking"):
        run(make(**settings), tmp_path, alone, keyed(make(**settings), tmp_path), grids=grids)
    assert set(grids[0].causes) == {"1 of 4 nodes that are left for sharing have clients, and 3 must"}
    assert len(unmasked(grids[0])) == (4 if work == "ask" else 0), "of the training's sum"


@pytest.mark.usefixtures("hostile")
@pytest.mark.parametrize("most", [2, 4])
def test_clients_of_two_nodes_are_too_few_and_of_three_are_enough(tmp_path: Path, most: int) -> None:
    """Nodes 1, 2 and 4 have a client each."""
    three, grids = [[0], [1], [], [4]], list[Watched]()
    some, nodes = listed(lambda node: three[node - 1] if node <= most else []), keyed(make(max_rounds=1), tmp_path)
    line = "the secure sum counts 3 updates of 5 clients" if most == 4 else "0 of 4 nodes are left for masking"
    with pytest.raises(LitFedError, match=line):
        run(make(max_rounds=1), tmp_path, some, nodes, grids=grids)
    refused = {"2 of 4 nodes that are left for sharing have clients, and 3 must"} if most == 2 else set()
    assert set(grids[0].causes) == refused


@pytest.mark.usefixtures("hostile")
def test_a_list_of_survivors_that_lost_a_node_with_clients_gets_no_consent(tmp_path: Path) -> None:
    """Three of four nodes have clients; without one of them t nodes are left, of whom two have."""

    def change(node: int, message: Message) -> Message:
        message = listed(lambda at: HOMES[at - 1] if at < 4 else [])(node, message)
        if not is_at(message, "consents", round_idx=0):
            return message
        own: Any = nodes[2].sums
        names = [name for name in message.fields["message"]["names"] if name != own.signer.name]
        return Message("secure", {**message.fields, "message": {"names": names}}, message.tensors)

    nodes, grids = keyed(make(max_rounds=1), tmp_path), list[Watched]()
    with pytest.raises(TooFew):
        run(make(max_rounds=1), tmp_path, change, nodes, grids=grids)
    assert "2 of 3 nodes that are left for the sum have clients, and 3 must" in grids[0].causes
    assert not unmasked(grids[0])


@pytest.mark.usefixtures("hostile")
def test_a_client_without_samples_does_not_count(tmp_path: Path) -> None:
    """Its update is zeros, and a sum of it and of one other client's is the other's; clients 1 to 4 have none."""
    nodes, grids = keyed(make(max_rounds=1), tmp_path), list[Watched]()
    for node in nodes:
        own: Any = node.sums
        own.summed.samples = lambda client_id: 2 * (client_id == 0)
    with pytest.raises(TooFew):
        run(make(max_rounds=1), tmp_path, None, nodes, grids=grids)
    assert set(grids[0].causes) == {"1 of 4 nodes that are left for sharing have clients, and 3 must"}


def test_a_node_keeps_its_own_smallest_sum_whatever_the_server_says(tmp_path: Path) -> None:
    """Node 1 wants four nodes with clients, and the sum has three: it is left out, and three are what others want."""
    settings = {"participation": Chosen([1, 2, 4])}
    nodes, grids = keyed(make(**settings), tmp_path), list[Watched]()
    own: Any = nodes[0].sums
    own.smallest = 4
    made = run(make(**settings), tmp_path, None, nodes, grids=grids)
    assert set(grids[0].causes) == {"3 of 4 nodes that are left for sharing have clients, and 4 must"}
    assert [row["secure_sum/nodes"] for row in rows(made.log_dir / "metrics.csv")] == ["4", "3"]
    assert [row["participation/count"] for row in rows(made.log_dir / "metrics.csv")] == ["5", "3"]


def test_the_smallest_sum_of_a_node_is_an_option_of_its_own(tmp_path: Path) -> None:
    (node,) = nodes_of(make(), tmp_path, [[0]], smallest_sum=2)
    assert node.sums is not None
    assert node.sums.smallest == 2
    with pytest.raises(ConfigError, match="--smallest_sum is 1; it must be at least 2"):
        nodes_of(make(), tmp_path, [[0]], smallest_sum=1)
    with pytest.raises(ConfigError, match=r"--smallest_sum is 3, and trainer\.secure_sum is None; leave it out"):
        nodes_of(make(secure_sum=None), tmp_path, [[0]], smallest_sum=3)


@pytest.mark.parametrize("told", [-1, "3", 2.0, True, None])
def test_a_malformed_smallest_sum_in_a_greeting_is_refused(tmp_path: Path, told: Any) -> None:
    (node,) = nodes_of(make(), tmp_path, [[0]])
    hello = {"protocol": PROTOCOL, "version": __version__, "settings": node.settings, "config": ""}
    message = decode(node.handle(encode(Message("hello", hello))))
    assert greeting(message, 5, 5).smallest == 3
    with pytest.raises(WireError, match=r"malformed; .*smallest_sum`"):
        greeting(Message("answer", {**message.fields, "smallest_sum": told}), 5, 5)


# ---------------------------------------------------------------------- an honest server


class Chosen(FullParticipation):
    """Round 1 has these clients alone."""

    def __init__(self, clients: list[int], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.clients = clients

    def plan(self, round_idx: int) -> list[Participant]:
        return [one for one in super().plan(round_idx) if round_idx != 1 or one.client_id in self.clients]


class Weights(Callback):
    """The global model after each round."""

    def __init__(self) -> None:
        self.found: list[dict[str, Tensor]] = []

    def on_round_end(self, run: Any, record: Any) -> None:
        model = run.federation.global_model(record.round_idx)
        self.found.append({name: tensor.clone() for name, tensor in model.items()})


@pytest.mark.parametrize("where", ["over nodes", "in memory"])
def test_a_round_with_too_few_clients_is_skipped_with_a_line_and_the_run_goes_on(
    tmp_path: Path, where: str, capsys: Any
) -> None:
    seen = Weights()
    nodes = None if where == "over nodes" else 4
    parts = make(participation=Chosen([0, 4]), max_rounds=3, secure_sum=SecureSum(3, 0.5, nodes), callbacks=[seen])
    made = run(parts, tmp_path) if nodes is None else simulate(parts, tmp_path)
    why = "2 of 4 nodes have clients in it" if nodes is None else "1 of 4 nodes that are left for sharing have clients"
    assert f"round 1 is skipped: {why}, and 3 must" in capsys.readouterr().out
    assert_same(seen.found[0], seen.found[1])
    assert not torch.equal(seen.found[1][W], seen.found[2][W])
    assert [row["participation/count"] for row in rows(made.log_dir / "metrics.csv")] == ["5", "0", "5"]


@pytest.mark.parametrize(
    ("participation", "most"),
    [(UniformParticipation(count=1), 1), (UniformParticipation(count=2), 2), (FullParticipation(every=4), 2)],
)
@pytest.mark.parametrize("nodes", [None, 4])
def test_a_cohort_that_is_always_too_small_is_refused_before_training(
    tmp_path: Path, participation: Participation, most: int, nodes: int | None
) -> None:
    """Clients 0 and 4 are on the first and the last of four nodes; in memory both are on node 0."""
    most = 1 if nodes == 4 and isinstance(participation, FullParticipation) else most
    parts = make(participation=participation, secure_sum=SecureSum(3, 0.5, nodes))
    with pytest.raises(ConfigError, match=f"at least 3 nodes with clients, and a round has clients on at most {most};"):
        run(parts, tmp_path) if nodes is None else simulate(parts, tmp_path)
    assert not list(tmp_path.rglob("*.states"))


def test_small_poisson_draws_are_skipped_and_others_are_not(tmp_path: Path, capsys: Any) -> None:
    parts = make(participation=PoissonParticipation(fraction=0.5), max_rounds=8, secure_sum=SecureSum(3, 0.5, 4))
    made = simulate(parts, tmp_path)
    said, table = capsys.readouterr().out, rows(made.log_dir / "metrics.csv")
    plans = [{one.client_id % 4 for one in made.participation.plan(at)} for at in range(8)]
    assert 0 < sum(len(plan) < 3 for plan in plans) < 8
    for at, plan in enumerate(plans):
        assert (f"round {at} is skipped" in said) == (len(plan) < 3)
        assert (table[at]["participation/count"] == "0") == (len(plan) < 3)


# ---------------------------------------------------------------------- restarts


@pytest.mark.parametrize("restarted", [(), (0, 1), (0, 1, 2, 3)], ids=["none", "two", "all"])
def test_restarted_nodes_remember_to_what_they_consented(tmp_path: Path, restarted: tuple[int, ...]) -> None:
    """Of four nodes and t = 3 two that forget, 2t - n, gave two sums that differ by the vector of one node."""
    nodes, grids = keyed(make(), tmp_path), list[Watched]()

    def lose(at: int, message: Message) -> Message | None:
        return None if at == 4 and is_at(message, "vectors") else message

    with pytest.raises(Killed):
        run(make(), tmp_path, killed_in_evaluation_of(1), nodes)
    for place in restarted:
        own: Any = nodes[place].sums
        folder = tmp_path / str(place)
        nodes[place] = Node(
            *make()(folder), clients=HOMES[place], folder=folder / "states", say=lambda line: None, signer=own.signer
        )
    with pytest.raises(TooFew, match="round 1 has no secure sum after 3 attempts: 0 of 4 nodes are left for consent"):
        run(
            make(),
            tmp_path,
            lose,
            nodes,
            "last",
            grids,
        )
    assert set(grids[0].causes) == {
        "this node consented to a sum of round 1 over other nodes; a second sum would tell of single nodes"
    }
    assert_same(
        weights(run(make(), tmp_path, nodes=nodes, ckpt_path="last")), weights(simulate(make(), tmp_path / "one"))
    )


def test_a_consent_is_on_the_disk_before_its_signature_leaves_and_none_leaves_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk of node 2 is full."""

    def record(place: int) -> Path:
        return tmp_path / str(place) / "states" / "sums" / "given.jsonl"

    def fsync(handle: int) -> None:
        for place in range(4):
            if record(place).exists() and os.fstat(handle).st_ino == record(place).stat().st_ino:
                if place == 1:
                    raise OSError(28, "No space left on device")
                written.append((place, len(record(place).read_text().splitlines())))

    class Looking(Watched):
        """Reads the record at the moment when a signature arrives."""

        def pull(self, message_ids: Any) -> Any:
            for reply in super().pull(message_ids):
                node, message, answer = self.crossed[-1]
                if "signature" in answer.fields.get("message", {}) and message.fields["stage"] == "consents":
                    signed.append(node)
                    assert written[-1] == (node - 1, 1 + (len(signed) > 3)), "with the evaluation's, two"
                yield reply

    written, signed = list[tuple[int, int]](), list[int]()
    monkeypatch.setattr("lit_fed.federation.secure.sum_log.os.fsync", fsync)
    given = make(max_rounds=1)
    nodes, (made, *parts) = keyed(given, tmp_path), given(tmp_path)
    with ExitStack() as stack:
        for node in nodes:
            stack.enter_context(node.at_work())
        federate(Looking(nodes), made, *parts)
    assert signed == [1, 3, 4] * 2, "of training and of the evaluation"


def test_a_record_on_the_disk_is_read_again_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    memory, words = SumLog(tmp_path), torch.arange(3).numpy().view("uint64")
    memory.note("run/train//", 0, b"one", b"", words)
    memory.note("run/train//", 0, b"one", b"list", words)
    memory.note("run/train//", 1, b"two", b"list", words + 1)
    again = SumLog(tmp_path)
    due = {("run/train//", 0): LoggedRound(-1, b"one", b"list"), ("run/train//", 1): LoggedRound(-1, b"two", b"list")}
    assert again.rounds == due
    found = again.words("run/train//", 1, b"two")
    assert found is not None
    assert found.tolist() == [1, 2, 3]
    assert again.words("run/train//", 0, b"one") is None  # a later one took its place
    again.note("another/train//", 0, b"one", b"list", words)
    assert again.words("run/train//", 1, b"two") is None  # of an earlier run
    record = tmp_path / "sums" / "given.jsonl"
    whole = record.read_bytes()
    record.write_bytes(whole + b'["run/train//", 2, "61')
    assert SumLog(tmp_path).rounds.keys() == due.keys() | {("another/train//", 0)}
    assert record.read_bytes() == whole, "a line that a kill cut off is gone"
    record.write_bytes(b"x\n" + whole)
    with pytest.raises(ConfigError, match="the node's record of secure sums, cannot be read"):
        SumLog(tmp_path)


# ---------------------------------------------------------------------- frozen tensors, and names of metrics


class Frozen(LeastSquares):
    """Has a parameter that its author froze, which nodes hold and the server names by its hash."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed = torch.nn.Parameter(torch.ones(2), requires_grad=False)


def test_a_model_with_frozen_parameters_is_summed_over_nodes(tmp_path: Path) -> None:
    parts = make(FedAvg, module=Frozen)
    assert_same(weights(run(parts, tmp_path / "one")), weights(simulate(parts, tmp_path / "other")))


class Undefined(LeastSquares):
    """Its test has no value on some clients."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        super().test_step(batch, batch_idx)
        first = batch[0][:, 0].mean()
        self.log("test/odd", torch.where(first > 0, first, torch.nan))


def test_a_metric_without_a_value_is_named_as_others_are(tmp_path: Path) -> None:
    """Odd clients have none; a list of names that lacks it told that a node has odd clients alone."""
    grids, parts = list[Watched](), make(module=Undefined, protocols=[ClientTest()], max_rounds=1)
    made = run(parts, tmp_path, grids=grids)
    offers = [
        answer.fields["message"]["names"]
        for _, message, answer in grids[0].crossed
        if is_at(message, "offer", "ask", 0)
    ]
    assert offers == [["loss", "odd"]] * 4
    assert rows(made.log_dir / "metrics.csv")[0]["clients/odd_mean"] == "1.0"
