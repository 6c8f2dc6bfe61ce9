"""An honest node against an attacking server: each attack is refused in one line, and no share is given twice."""

from __future__ import annotations

import copy
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from lit_fed.federation.secure.messages import (
    AllKeys,
    Consents,
    Invitation,
    Refusal,
    Relayed,
    SignedKeys,
    Survivors,
    TooFew,
    Unmasking,
)
from lit_fed.federation.secure.packed import pack, unpack
from lit_fed.federation.secure.party import Party
from tests.federation.secure.support import KEYS, Attempt, call_of, identities, names, nodes, plain, vectors


def refused(step: Any, *given: Any) -> str:
    with pytest.raises(Refusal) as caught:
        step(*given)
    line = str(caught.value)
    assert "\n" not in line
    return line


# ---------------------------------------------------------------------- calls


def begin(call: Invitation, **more: Any) -> str:
    return refused(Party("n0", KEYS[0], identities(4), **more).begin, call, vectors(4)["n0"])


def test_a_shrunken_roster_is_refused() -> None:
    """Two nodes, one of them the server's: the sum would be the other's vector."""
    assert begin(call_of(2, 2)) == "the roster has 2 nodes, and this node's sums are over at least 3"
    assert begin(call_of(4, 3), smallest=5) == "the roster has 4 nodes, and this node's sums are over at least 5"


def test_a_sybil_that_the_node_does_not_know_is_refused() -> None:
    roster = ("n0", "n1", "n2", "sybil")
    assert begin(call_of(4, 3, roster=roster)) == (
        "the roster of the secure sum names node sybil, which does not belong there"
    )


def test_a_node_that_stands_in_the_roster_twice_is_refused() -> None:
    assert begin(call_of(4, 3, roster=("n0", "n1", "n1"))) == "the roster of the secure sum names node n1 twice"


@pytest.mark.parametrize(("count", "threshold"), [(3, 2), (4, 2), (4, 5), (4, 0), (4, 1)])
def test_a_threshold_of_two_thirds_or_less_is_refused(count: int, threshold: int) -> None:
    assert begin(call_of(count, threshold)) == (
        f"the threshold is {threshold} of {count} nodes; against an active server it must be above two thirds of them"
    )


def test_calls_that_are_not_this_nodes_are_refused() -> None:
    assert "lacks node n0" in begin(call_of(4, 3, roster=("n1", "n2", "n3")))
    assert "vectors of 6 words, and this node has 5" in begin(call_of(4, 3, length=6))
    with pytest.raises(Refusal, match="a message Invitation of the secure sum is malformed"):
        unpack(Invitation, pack(call_of(4, 3, round_idx=True))[0], {})


def test_an_attempt_is_not_repeated_and_no_round_is_summed_twice() -> None:
    attempt = Attempt(4, 3, "consents")
    node, given = attempt.nodes["n0"], attempt.given["n0"]
    assert refused(node.begin, attempt.call, given) == "attempt 0 of round 0 is not later than the last one"
    attempt = Attempt(4, 3, "consents")
    node = attempt.nodes["n0"]
    node.answer(attempt.messages["n0"])
    assert refused(node.begin, replace(attempt.call, attempt=1), given, b"another request") == (
        "round 0 got this node's vector before, for another model, clients or metrics; a second sum would tell of "
        "single nodes"
    )
    assert node.begin(replace(attempt.call, round_idx=1), given).name == "n0"


def test_an_unmasked_round_is_summed_again_over_the_same_nodes_only() -> None:
    """As a server asks that was killed before it kept the sum: the same vectors give the same sum."""
    first = Attempt(4, 3, "consents")
    for name, message in first.messages.items():
        first.nodes[name].answer(message)
    for again, lost in ((1, ("n3",)), (2, ())):
        repeated = Attempt(4, 3, "vectors", lost, first.nodes, attempt=again)
        survivors = repeated.messages
        if lost:
            assert refused(first.nodes["n0"].answer, survivors["n0"]) == (
                "this node consented to a sum of round 0 over other nodes; a second sum would tell of single nodes"
            )
            continue
        consents = repeated.server.consents({name: first.nodes[name].answer(one) for name, one in survivors.items()})
        total = repeated.server.total({name: first.nodes[name].answer(one) for name, one in consents.items()})
        assert total.tolist() == plain(first.given).tolist()


# ---------------------------------------------------------------------- keys and shares


def keys_of(attempt: Attempt) -> dict[str, SignedKeys]:
    message: Any = attempt.messages["n0"]
    return {keys.name: keys for keys in message.keys}


def test_swapped_keys_are_refused() -> None:
    attempt = Attempt(4, 3, "keys")
    keys = keys_of(attempt)
    swapped = [keys["n0"], replace(keys["n1"], masking=keys["n2"].masking), keys["n2"], keys["n3"]]
    line = refused(attempt.nodes["n0"].answer, AllKeys(tuple(swapped)))
    assert line == "the keys of node n1 are not signed by it for this attempt"


def test_the_servers_own_keys_under_a_nodes_name_are_refused() -> None:
    attempt = Attempt(4, 3, "keys")
    server = Party("n1", KEYS[9], identities(4)).begin(attempt.call, attempt.given["n1"])  # another certificate's key
    line = refused(
        attempt.nodes["n0"].answer, AllKeys((*[k for n, k in keys_of(attempt).items() if n != "n1"], server))
    )
    assert line == "the keys of node n1 are not signed by it for this attempt"


def test_keys_of_another_attempt_or_round_are_refused() -> None:
    for more in ({"attempt": 1}, {"round_idx": 1}, {"run": "other"}, {"about": "another model"}):
        attempt = Attempt(4, 3, "keys")
        old = nodes(4)["n1"].begin(replace(attempt.call, **more), attempt.given["n1"])  # type: ignore[arg-type]
        replayed = AllKeys(tuple(({**keys_of(attempt), "n1": old}).values()))
        assert refused(attempt.nodes["n0"].answer, replayed) == (
            "the keys of node n1 are not signed by it for this attempt"
        )


def test_other_keys_of_its_own_a_missing_list_and_too_few_keys_are_refused() -> None:
    attempt = Attempt(4, 3, "keys")
    keys = keys_of(attempt)
    assert refused(attempt.nodes["n0"].answer, AllKeys(tuple(keys[n] for n in ("n1", "n2", "n3")))) == (
        "the keys of node n0 are not those that it sent"
    )
    line = refused(attempt.nodes["n1"].answer, AllKeys((keys["n0"], keys["n1"])))
    assert line == "2 of 4 nodes are left for sharing, and 3 are needed"
    assert "twice" in refused(attempt.nodes["n2"].answer, AllKeys((*keys.values(), keys["n1"])))


def test_replayed_shares_are_refused() -> None:
    """Those of another attempt, those that were sealed for another node, and a node's own."""
    old = Attempt(4, 3, "shares").messages["n0"]
    attempt = Attempt(4, 3, "shares")
    assert refused(attempt.nodes["n0"].answer, old) == ("the shares of node n1 are not sealed by it for this attempt")
    line = refused(attempt.nodes["n1"].answer, attempt.messages["n2"])
    assert line in (
        "the shares of node n0 are not sealed by it for this attempt",
        "the shares of the secure sum names node n1, which does not belong there",
    )


# ---------------------------------------------------------------------- survivors and consents


def test_a_node_never_gives_both_shares_of_another() -> None:
    """A server that calls n3 lost and alive: the survivors are one list, and the lost are all others."""
    attempt = Attempt(4, 3, "vectors", lost=("n3",))
    node = attempt.nodes["n0"]
    assert refused(node.answer, Survivors(("n0", "n1", "n2", "n3", "n3"))) == (
        "the list of survivors of the secure sum names node n3 twice"
    )
    attempt = Attempt(4, 3, "consents", lost=("n3",))
    for name in ("n0", "n1", "n2"):
        given: Any = attempt.nodes[name].answer(attempt.messages[name])
        assert set(given.seeds) == {"n0", "n1", "n2"}
        assert set(given.keys) == {"n3"}


def test_different_lists_for_different_nodes_unmask_nothing() -> None:
    """n0 and n1 are told that n3 is lost, n2 and n3 that it lives: no list has three signatures."""
    attempt = Attempt(4, 3, "vectors")
    lists = {n: Survivors(tuple(names(3 if n in ("n0", "n1") else 4))) for n in names(4)}
    consents: dict[str, Any] = {name: attempt.nodes[name].answer(one) for name, one in lists.items()}
    signatures = {name: one.signature for name, one in consents.items()}
    assert refused(attempt.nodes["n0"].answer, Consents({n: signatures[n] for n in names(3)})) == (
        "node n2 did not sign this list of survivors"
    )
    line = refused(attempt.nodes["n2"].answer, Consents({n: signatures[n] for n in ("n2", "n3")}))
    assert line == "2 of 4 nodes are left for consent, and 3 are needed"


def test_consents_of_nodes_that_saw_other_keys_do_not_count() -> None:
    """n3's keys are kept from n0 alone; the lists of survivors are equal, and what the nodes sign is not."""
    attempt = Attempt(4, 3, "keys")
    sent: dict[str, Any] = dict(attempt.messages)
    sent["n0"] = AllKeys(tuple(keys_of(attempt)[name] for name in names(3)))
    sealed: dict[str, Any] = {name: attempt.nodes[name].answer(one) for name, one in sent.items()}
    for name in names(3):
        others = {other: sealed[other].shares[name] for other in names(3) if other != name}
        attempt.nodes[name].answer(Relayed(others, tuple(names(3))))
    consents: dict[str, Any] = {name: attempt.nodes[name].answer(Survivors(tuple(names(3)))) for name in names(3)}
    signatures = {name: one.signature for name, one in consents.items()}
    assert refused(attempt.nodes["n0"].answer, Consents(signatures)) == "node n1 did not sign this list of survivors"


def test_a_list_without_the_node_or_below_its_smallest_sum_is_refused() -> None:
    attempt = Attempt(4, 3, "vectors")
    assert refused(attempt.nodes["n0"].answer, Survivors(("n1", "n2", "n3"))) == (
        "the list of survivors lacks node n0, which sent its vector"
    )
    line = refused(attempt.nodes["n1"].answer, Survivors(("n1", "n2")))
    assert line == "2 of 4 nodes are left for the sum, and 3 are needed"


def test_nothing_is_unmasked_twice_and_a_refusal_ends_the_attempt() -> None:
    attempt = Attempt(4, 3, "consents")
    node, message = attempt.nodes["n0"], attempt.messages["n0"]
    assert isinstance(node.answer(message), Unmasking)
    assert refused(node.answer, message) == "no attempt of a secure sum is under way on this node"
    other = attempt.nodes["n1"]
    assert refused(other.answer, Survivors(tuple(names(4)))) == (
        "Survivors came out of turn; the next message is Consents"
    )
    assert "no attempt" in refused(other.answer, attempt.messages["n1"])


# ---------------------------------------------------------------------- ten thousand messages


def mutated(value: Any, draw: random.Random) -> Any:
    """A message's content with one of its parts replaced, dropped, repeated or cut."""
    odd = [None, -1, 2**600, "n1", "\ud800", "", "eA==" * 2000, [], {}, 1.5, True, ["n0"], "n9"]
    if isinstance(value, list) and value and draw.random() < 0.8:
        at = draw.randrange(len(value))
        return draw.choice([value[:at], [*value, value[at]], [*value[:at], mutated(value[at], draw), *value[at + 1 :]]])
    if isinstance(value, dict) and value and draw.random() < 0.8:
        name = draw.choice(sorted(value))
        without = {key: one for key, one in value.items() if key != name}
        changed = {**value, name: mutated(value[name], draw)}
        return draw.choice([without, changed, changed, {**value, draw.choice(["n1", "\ud800", "n9"]): "eA=="}])
    if isinstance(value, str) and value and draw.random() < 0.8:
        at = draw.randrange(len(value))
        return draw.choice([value[:at], value[:at] + draw.choice("Ae9/") + value[at + 1 :]])
    return draw.choice(odd)


def on_the_wire(message: Any, draw: random.Random) -> Any:
    """A message that was mutated on its way."""
    return unpack(type(message), mutated(pack(message)[0], draw), {})


def live(node: Party) -> Party:
    """A copy of a node in the middle of its attempt."""
    clone = copy.copy(node)
    own = clone._attempt
    assert own is not None
    clone._attempt = replace(own, keys=dict(own.keys), shares=dict(own.shares))
    clone._rounds, clone._given = copy.deepcopy(node._rounds), copy.copy(node._given)
    clone._attempt.logged = clone._rounds[own.call.run, own.call.round_idx]
    return clone


def test_ten_thousand_mutated_messages_are_refused_or_answered_and_no_share_is_given_twice() -> None:
    """Each message reaches a node that waits for one of its kind, and the right one follows twice."""
    draw, answered = random.Random(0), Counter[str]()
    stages = [(stage, lost) for stage in ("keys", "shares", "vectors", "consents") for lost in ((), ("n4",))]
    attempts = [Attempt(5, 4, stage, lost) for stage, lost in stages]
    for _ in range(10_000):
        attempt = draw.choice(attempts)
        name = draw.choice(sorted(attempt.messages))
        node, given = live(attempt.nodes[name]), list[Any]()
        for is_mutated in (True, False, False):
            try:
                right = attempt.messages[name]
                given.append(node.answer(on_the_wire(right, draw) if is_mutated else right))
            except Refusal:
                answered["Refusal"] += 1
        try:
            node.begin(on_the_wire(attempt.call, draw), attempt.given[name])
        except Refusal:
            answered["Refusal"] += 1
        unmasked = [answer for answer in given if isinstance(answer, Unmasking)]
        assert len(unmasked) <= 1
        assert all(not set(answer.seeds) & set(answer.keys) for answer in unmasked)
        answered.update(type(answer).__name__ for answer in given)
    assert set(answered) == {"Sealed", "Masked", "Consent", "Unmasking", "Refusal"}


def test_too_few_is_a_refusal_that_others_may_be_told() -> None:
    assert TooFew("line").remote_text() == "line"
