"""Masks and shares among neighbours on a ring: the complete graph's sum, every loss, and what a server may not do."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest

from lit_fed.errors import ConfigError
from lit_fed.federation.secure import party
from lit_fed.federation.secure.coordinator import STAGES, run_attempt, secure_sum
from lit_fed.federation.secure.messages import Consents, Invitation, Refusal, Relayed, Survivors, TooFew
from lit_fed.federation.secure.packed import pack, unpack
from lit_fed.federation.secure.party import pair_mask
from lit_fed.privacy import SecureSum
from tests.federation.secure.support import Attempt, call_of, identities, names, nodes, plain, vectors


def sparse(count: int, threshold: int, dishonest: int | None) -> Invitation:
    return Invitation("r", 0, 0, tuple(f"{place:04}" for place in range(count)), threshold, 1, "", dishonest)


def reached(call: Invitation, left: set[str]) -> set[str]:
    """The nodes that are connected with the first, by way of those that are left."""
    found, new = set[str](), {min(left)}
    while new:
        found |= new
        new = {other for name in new for other in call.near(name) & left} - found
    return found


# ---------------------------------------------------------------------- the ring


@pytest.mark.parametrize(
    ("count", "threshold", "dishonest", "degree", "least"),
    [
        (7, 6, 0, 2, 2),
        (7, 6, 1, 4, 4),
        (8, 6, 0, 4, 3),
        (8, 6, 1, 6, 5),
        (100, 90, 10, 30, 21),
        (1000, 950, 50, 150, 101),
    ],
)
def test_neighbours_by_hand(count: int, threshold: int, dishonest: int, degree: int, least: int) -> None:
    """2 (n - t) + B, up to the next even number; t of n leave n - t of a neighbourhood out: 100 nodes, 10 + 10 + 10."""
    call = sparse(count, threshold, dishonest)
    assert {len(call.near(name)) - 1 for name in call.roster} == {degree}
    assert call.least_shares == least
    assert call.near("0000") == {f"{place % count:04}" for place in range(-degree // 2, degree // 2 + 1)}


def test_the_most_that_a_threshold_bears_are_all_nodes() -> None:
    for count in range(3, 40):
        for threshold in range(2 * count // 3 + 1, count + 1):
            for dishonest in (None, 2 * threshold - count - 1):
                call = sparse(count, threshold, dishonest)
                assert all(call.near(name) == set(call.roster) for name in call.roster)
                assert call.least_shares == threshold


def test_dishonest_and_two_sets_of_lost_nodes_never_fill_a_neighbourhood() -> None:
    """B shares are too few for a secret, and so are those of two lists of survivors: B < s and 2 s - m > B."""
    for count in range(3, 60):
        for threshold in range(2 * count // 3 + 1, count + 1):
            for dishonest in range(2 * threshold - count):
                call = sparse(count, threshold, dishonest)
                call.check()
                size, least = len(call.near("0000")), call.least_shares
                assert dishonest < least
                assert 2 * least - size > dishonest
                assert 2 * threshold - count > dishonest
                assert size - (count - threshold) >= least


def test_a_ring_without_dishonest_and_lost_nodes_is_connected_wherever_they_are() -> None:
    for count, threshold in ((5, 4), (6, 5), (7, 5), (7, 6), (8, 6), (9, 7), (9, 8), (10, 8), (6, 6)):
        for dishonest in range(2 * threshold - count):
            call = sparse(count, threshold, dishonest)
            for gone in combinations(call.roster, count - threshold + dishonest):
                left = set(call.roster) - set(gone)
                assert reached(call, left) == left


# ---------------------------------------------------------------------- the sum


@pytest.mark.parametrize(("count", "threshold", "dishonest"), [(7, 6, 0), (7, 6, 1), (8, 6, 1), (10, 8, 0), (9, 9, 0)])
def test_the_sum_is_the_complete_graphs_to_the_bit(
    count: int, threshold: int, dishonest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node makes a mask for each neighbour, and shares its secrets with each."""
    given, sent, masks = vectors(count, 50), list[Any](), list[list[str]]()

    def counted(call: Any, private: Any, name: str, other: Any) -> Any:
        masks.append([name, other.name])
        return pair_mask(call, private, name, other)

    monkeypatch.setattr(party, "pair_mask", counted)

    def deliver(_: int, stage: str, name: str, step: Any) -> Any:
        answer = step()
        sent.extend([len(answer.shares)] if stage == "shares" else [])
        return answer

    made = secure_sum(nodes(count), given, identities(count), threshold, deliver=deliver, dishonest=dishonest)
    degree = len(sparse(count, threshold, dishonest).near("0000")) - 1
    assert set(sent) == {degree}
    assert len(masks) == count * degree
    assert all(b in call_of(count, threshold, dishonest=dishonest).near(a) for a, b in masks)
    monkeypatch.undo()
    assert made[0].tobytes() == secure_sum(nodes(count), given, identities(count), threshold)[0].tobytes()
    assert made[0].tobytes() == plain(given).tobytes()


@pytest.mark.parametrize(("count", "threshold", "most"), [(7, 6, 1), pytest.param(8, 6, 2, marks=pytest.mark.long)])
def test_every_set_of_losses_at_every_stage_ends_with_the_survivors_sum(count: int, threshold: int, most: int) -> None:
    """Each of up to n - t nodes is lost before one of the five stages: 36 ways, and 741; one more loss ends the sum."""
    given, known = vectors(count, 2), identities(count)
    call = call_of(count, threshold, length=2, dishonest=0)
    tried = 0
    for size in range(most + 1):
        for lost, stages in product(combinations(names(count), size), product(range(5), repeat=size)):
            fate, tried = dict(zip(lost, stages, strict=True)), tried + 1

            def deliver(_: int, stage: str, name: str, step: Any, fate: dict[str, int] = fate) -> Any:
                return step() if fate.get(name, 5) > STAGES.index(stage) else None

            total, survivors = run_attempt(call, nodes(count), given, known, deliver)
            assert survivors == {n for n in names(count) if fate.get(n, 5) > STAGES.index("vectors")}
            assert total.tolist() == plain(given, survivors).tolist()
    assert tried == {7: 36, 8: 741}[count]
    for stage in STAGES:
        with pytest.raises(TooFew):
            run_attempt(
                call, nodes(count), given, known,
                lambda _, at, name, step, stage=stage: None if at == stage and name in names(most + 1) else step(),
            )  # fmt: skip


# ---------------------------------------------------------------------- a server that breaks the protocol


def refused(step: Any, *given: Any) -> str:
    with pytest.raises(Refusal) as caught:
        step(*given)
    return str(caught.value)


def test_shares_and_the_list_of_those_that_shared_must_agree() -> None:
    """n0's neighbours among seven, for B = 1, are n5, n6, n1 and n2."""
    for change in ("withheld", "denied", "others"):
        attempt = Attempt(7, 6, "shares", dishonest=1)
        message: Any = attempt.messages["n0"]
        assert set(message.shares) == {"n5", "n6", "n1", "n2"}
        fewer = {name: one for name, one in message.shares.items() if name != "n1"}
        changed = {
            "withheld": Relayed(fewer, message.sharing),
            "denied": Relayed(message.shares, tuple(name for name in message.sharing if name != "n1")),
            "others": Relayed({**message.shares, "n3": message.shares["n1"]}, message.sharing),
        }[change]
        assert refused(attempt.nodes["n0"].answer, changed) == (
            "the shares of the secure sum are not those of the neighbours that shared"
        )


def test_a_node_that_is_told_another_list_of_those_that_shared_does_not_consent_with_the_others() -> None:
    attempt = Attempt(7, 6, "shares", dishonest=1)
    message: Any = attempt.messages["n0"]
    sent = {**attempt.messages, "n0": Relayed(message.shares, tuple(n for n in message.sharing if n != "n3"))}
    masked: dict[str, Any] = {name: attempt.nodes[name].answer(one) for name, one in sent.items()}
    survivors = attempt.server.vectors(masked)
    attempt.nodes.pop("n0"), attempt.nodes.pop("n6")
    consents: dict[str, Any] = {name: node.answer(survivors[name]) for name, node in attempt.nodes.items()}
    with pytest.raises(TooFew, match="5 of 7 nodes are left for consent, and 6 are needed"):
        attempt.server.consents(consents)


def test_a_node_gives_shares_of_its_neighbours_alone_and_never_both() -> None:
    attempt = Attempt(8, 6, "consents", lost=("n1",), dishonest=0)
    for name in attempt.messages:
        given: Any = attempt.nodes[name].answer(attempt.messages[name])
        near = attempt.call.near(name)
        assert given.seeds.keys() == near - {"n1"}
        assert given.keys.keys() == near & {"n1"}


def test_different_lists_of_survivors_unmask_nothing() -> None:
    attempt = Attempt(7, 6, "vectors", dishonest=0)
    lists = {n: Survivors(tuple(x for x in names(7) if x != ("n3" if n in ("n0", "n1") else "n4"))) for n in names(7)}
    consents: dict[str, Any] = {
        name: attempt.nodes[name].answer(one) for name, one in lists.items() if name in one.names
    }
    signatures = {name: one.signature for name, one in consents.items() if name not in ("n3", "n4")}
    assert "did not sign this list of survivors" in refused(attempt.nodes["n0"].answer, Consents(signatures))


@pytest.mark.parametrize("dishonest", [-1, 5, True, "1"])
def test_a_number_that_a_threshold_does_not_bear_is_refused(dishonest: Any) -> None:
    with pytest.raises(Refusal, match=r"dishonest nodes are more than 6 of 7 bear|is malformed"):
        unpack(Invitation, pack(call_of(7, 6, dishonest=dishonest))[0], {}).check()


def test_settings_beyond_the_threshold_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer\.secure_sum\.dishonest is 5"):
        SecureSum(6, 1.0, 7, 5).validate()
    SecureSum(6, 1.0, 7, 4).validate()
