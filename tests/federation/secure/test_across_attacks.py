"""A server that breaks the protocol, between it and honest nodes: each attack is refused by a node in one line."""

from __future__ import annotations

import copy
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lit_fed.errors import ConfigError, LitFedError
from lit_fed.federation.keys.node_keys import Grant, read_hashes
from lit_fed.federation.messages.wire import Message, decode, encode
from lit_fed.federation.node.node import Node
from lit_fed.federation.secure.messages import TooFew
from lit_fed.federation.secure.party import Party
from lit_fed.federation.secure.signer import Signer
from lit_fed.federation.secure.sum_log import SumLog
from lit_fed.federation.server.federate import federate
from tests.federation.fuzz import MOST_S, Fuzzer
from tests.federation.secure.nodes import Watched, is_at, keyed, make, run
from tests.federation.support import simulate
from tests.support import assert_same, weights

Change = Callable[[int, Message], Message | None]


def altered(message: Message, place: str = "message", **more: Any) -> Message:
    """A message with other fields in its content."""
    content = {**message.fields[place], **more}
    return Message("secure", {**message.fields, place: content}, message.tensors)


def refused(folder: Path, change: Change, nodes: list[Node] | None = None) -> set[str]:
    """What nodes refuse, of a run that ends without a sum."""
    grids = list[Watched]()
    with pytest.raises(LitFedError):
        run(make(), folder, change, nodes or keyed(make(), folder), grids=grids)
    causes = set(grids[0].causes)
    assert all("\n" not in cause for cause in causes)
    return causes


def in_every_attempt(stage: str, alter: Callable[[int, Message], Message]) -> Change:
    return lambda node, message: alter(node, message) if is_at(message, stage, round_idx=0) else message


def of(causes: set[str], *words: str) -> bool:
    return any(all(word in cause for word in words) for cause in causes)


def test_a_node_in_both_lists_is_refused(tmp_path: Path) -> None:
    """The list of survivors names it twice; the lost are all others, so that there is no second list."""

    def alter(_: int, message: Message) -> Message:
        names = message.fields["message"]["names"]
        return altered(message, names=[*names, names[0]])

    assert of(refused(tmp_path, in_every_attempt("consents", alter)), "list of survivors", "twice")


def test_different_lists_for_different_nodes_unmask_nothing(tmp_path: Path) -> None:
    """Two of four nodes are told that another is lost: no list has three signatures, and no node gives a share."""

    def alter(node: int, message: Message) -> Message:
        names, own = message.fields["message"]["names"], [one.sums.signer.name for one in nodes if one.sums is not None]
        lost = own[2]
        return altered(message, names=[name for name in names if name != lost or node > 2])

    nodes, grids = keyed(make(), tmp_path), list[Watched]()
    with pytest.raises(TooFew, match=r"[02] of 4 nodes are left for consent"):
        run(make(), tmp_path, in_every_attempt("consents", alter), nodes, grids=grids)
    assert not [message for _, message, answer in grids[0].crossed if "seeds" in answer.fields.get("message", {})]


def test_swapped_keys_are_refused(tmp_path: Path) -> None:
    def alter(_: int, message: Message) -> Message:
        one, other, *more = message.fields["message"]["keys"]
        return altered(
            message, keys=[{**one, "masking": other["masking"]}, {**other, "masking": one["masking"]}, *more]
        )

    assert of(refused(tmp_path, in_every_attempt("shares", alter)), "are not signed by it for this attempt")


def test_replayed_shares_are_refused(tmp_path: Path) -> None:
    """The shares of the first attempt, which lost its vectors, come again in the second."""
    old: dict[int, Message] = {}

    def change(node: int, message: Message) -> Message | None:
        if not is_at(message, "vectors", round_idx=0):
            return message
        if node not in old:
            old[node] = message
            return None
        return old[node]

    assert of(refused(tmp_path, change), "are not sealed by it for this attempt")


def test_a_shrunken_roster_and_a_lowered_threshold_are_refused(tmp_path: Path) -> None:
    def shrunken(_: int, message: Message) -> Message:
        roster = message.fields["call"]["roster"][:2]
        nodes = {name: message.fields["nodes"][name] for name in roster}
        smaller = Message("secure", {**message.fields, "nodes": nodes}, message.tensors)
        return altered(smaller, "call", roster=roster)

    def lowered(node: int, message: Message) -> Message:
        return altered(shrunken(node, message), "call", threshold=2)

    def bare(_: int, message: Message) -> Message:
        return altered(message, "call", dishonest=0)

    assert of(refused(tmp_path / "none", in_every_attempt("keys", bare)), "than trainer.secure_sum.dishonest on this")
    assert of(refused(tmp_path / "one", in_every_attempt("keys", shrunken)), "the threshold is 3 of 2 nodes")
    assert of(
        refused(tmp_path / "two", in_every_attempt("keys", lowered)),
        "the threshold is 2, and trainer.secure_sum.threshold is 3 on this node",
    )


def test_a_sybil_that_is_no_peer_is_refused(tmp_path: Path) -> None:
    sybil = Signer()

    def alter(_: int, message: Message) -> Message:
        own = message.fields["call"]["roster"]
        roster = sorted([*own[:2], sybil.name, Signer().name])
        nodes = {**message.fields["nodes"], sybil.name: sybil.public.hex()}
        return altered(Message("secure", {**message.fields, "nodes": nodes}, {}), "call", roster=roster)

    causes = refused(tmp_path, in_every_attempt("keys", alter))
    assert causes == {f"node {sybil.name} is not in --peers of this node"}


def test_another_key_under_a_peers_name_is_refused(tmp_path: Path) -> None:
    def alter(_: int, message: Message) -> Message:
        names = sorted(message.fields["nodes"])
        nodes = {**message.fields["nodes"], names[0]: Signer().public.hex()}
        return Message("secure", {**message.fields, "nodes": nodes}, message.tensors)

    assert of(refused(tmp_path, in_every_attempt("keys", alter)), "is another node's")


def test_another_model_for_one_node_is_refused(tmp_path: Path) -> None:
    """Pasquini, Francati, Ateniese, CCS 2022: models that silence all nodes but one make the sum that node's update."""

    def change(node: int, message: Message) -> Message:
        if message.word != "train" or node != 1:
            return message
        payload = {name: tensor + 1 for name, tensor in message.tensors["payload"].items()}
        return Message("train", message.fields, {**message.tensors, "payload": payload})

    grids = list[Watched]()
    run(make(on_client_failure="skip"), tmp_path, change, keyed(make(on_client_failure="skip"), tmp_path), grids=grids)
    assert of(set(grids[0].causes), "the secure sum is about another model than this node's clients worked with")
    sums = [one for one in grids[0].crossed if one[0] == 1 and is_at(one[1], "keys") and one[2].word == "answer"]
    assert not sums, "the node gives no keys"


def test_a_metric_that_is_left_out_and_a_client_without_work_are_refused(tmp_path: Path) -> None:
    def nameless(_: int, message: Message) -> Message:
        return Message("secure", {**message.fields, "names": []}, message.tensors)

    def more(_: int, message: Message) -> Message:
        return Message("secure", {**message.fields, "clients": [0, 1, 2, 3, 4]}, message.tensors)

    assert of(refused(tmp_path / "one", in_every_attempt("keys", nameless)), "leaves out the metric train/loss")
    assert of(refused(tmp_path / "two", in_every_attempt("offer", more)), "has no work of client")


def test_nothing_is_unmasked_twice(tmp_path: Path) -> None:
    nodes, grids = keyed(make(), tmp_path), list[Watched]()
    run(make(), tmp_path, None, nodes, grids=grids)
    for node, message, answer in grids[0].crossed:
        if message.word == "secure" and message.fields["stage"] == "total":
            assert answer.word == "answer"
            again = decode(nodes[node - 1].handle(encode(message)))
            assert again.fields["cause"] == "no attempt of a secure sum is under way on this node"


# ---------------------------------------------------------------------- keys


def test_a_node_whose_key_is_not_its_certificates_is_left_out(tmp_path: Path, capsys: Any) -> None:
    nodes = keyed(make(), tmp_path)

    class Keyed(Watched):
        def nodes(self) -> dict[int, str]:
            own: list[Any] = [node.sums for node in nodes]
            return {at: own[at - 1].signer.name if at > 1 else "0" * 64 for at in self.handlers}

    grid = Keyed(nodes)
    grants = {key: Grant(frozenset(range(5))) for key in grid.nodes().values()}
    made, *parts = make(on_client_failure="skip")(tmp_path)
    with ExitStack() as stack:
        for node in nodes:
            stack.enter_context(node.at_work())
        federate(grid, made, *parts, node_clients=grants)
    assert (
        "the answer of node 1 is dropped: it signs with another key than its certificate's" in capsys.readouterr().out
    )


def test_lists_of_peers(tmp_path: Path) -> None:
    one, path = Signer().name, tmp_path / "peers.txt"
    path.write_text(f"# all of them\n{one}  # north\n\n")
    assert read_hashes(str(path), "--peers") == {one}
    path.write_text("north\n")
    with pytest.raises(ConfigError, match=r"--peers .* has 'north'; write the SHA-256 of a public key"):
        read_hashes(str(path), "--peers")
    with pytest.raises(ConfigError, match=r"--peers .* cannot be read \(FileNotFoundError\)"):
        read_hashes(str(tmp_path / "none"), "--peers")


# ---------------------------------------------------------------------- mutated messages


def cloned(party: Party) -> Party:
    """A copy of a node's half in the middle of its attempt."""
    clone = copy.copy(party)
    clone._rounds, clone._given = copy.deepcopy(party._rounds), SumLog()  # not the node's file
    if (own := party._attempt) is not None:
        known = clone._rounds[own.call.run, own.call.round_idx]
        clone._attempt = replace(own, keys=dict(own.keys), shares=dict(own.shares), logged=known)
    return clone


CONTEXTS = 2 * 2 * 4 * 6
"""Rounds, works, nodes and stages: each message of a run is mutated."""


def fuzz(folder: Path, cases: int, seed: int = 0) -> Counter[str]:
    """Mutate every message of two rounds on its way to its node, and send the right one twice after it.

    Raises:
        AssertionError: If an answer is no message or takes long, a node gives both shares of another or shares twice,
            or the run ends otherwise than without the mutated messages.
    """
    fuzzer, seen, given = Fuzzer(seed, cases), Counter[str](), make()
    nodes = keyed(given, folder / "nodes")

    def change(node: int, message: Message) -> Message:
        own: Any = nodes[node - 1].sums
        party, blob = own.party, encode(message)
        for _ in range(-(-cases // CONTEXTS) if message.word == "secure" else 0):
            own.party, begun = cloned(party), time.process_time()
            answers = [decode(nodes[node - 1].handle(one)) for one in (fuzzer.mutate(blob), blob, blob)]
            assert time.process_time() - begun < 3 * MOST_S
            for answer in answers:
                assert answer.word in ("answer", "failure")
                assert str(answer.fields.get("cause", "")).isprintable()
                seen[answer.word] += 1
            unmasked = [one.fields["message"] for one in answers if "seeds" in one.fields.get("message", {})]
            assert len(unmasked) <= 1
            assert not any(one["seeds"].keys() & one["keys"].keys() for one in unmasked)
            seen["unmasked"] += len(unmasked)
        own.party = party
        return message

    assert_same(weights(run(given, folder, change, nodes)), weights(simulate(given, folder / "one")))
    assert fuzzer.count >= cases
    return seen


def test_mutated_messages_to_a_node_are_answered_or_refused(tmp_path: Path) -> None:
    assert fuzz(tmp_path, CONTEXTS).keys() == {"answer", "failure", "unmasked"}


@pytest.mark.long
def test_ten_thousand_mutated_messages_to_a_node_are_answered_or_refused(tmp_path: Path) -> None:
    """10,080 of them: 10,251 answers, 19,989 refusals and 1,228 unmaskings of 30,240 messages when it was written."""
    assert fuzz(tmp_path, 10_000, seed=7).keys() == {"answer", "failure", "unmasked"}
