"""The whole protocol: the exact sum under every set of losses, and what the server does about bad nodes."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations, product
from typing import Any

import numpy as np
import pytest

from lit_fed.federation.secure.coordinator import STAGES, run_attempt, secure_sum
from lit_fed.federation.secure.messages import Consent, Refusal, Sealed, TooFew, Unmasking
from tests.federation.secure.support import Attempt, call_of, identities, names, nodes, plain, vectors


def test_the_sum_is_the_plain_one_to_the_bit() -> None:
    given = vectors(4, 1000)
    total, survivors = secure_sum(nodes(4), given, identities(4), 3)
    assert total.tobytes() == plain(given).tobytes()
    assert survivors == set(names(4))


@pytest.mark.parametrize(
    ("count", "threshold"),
    [(4, 3), pytest.param(4, 4, marks=pytest.mark.long), pytest.param(5, 4, marks=pytest.mark.long)],
)
def test_every_set_of_losses_at_every_stage_ends_with_the_survivors_sum_or_with_none(
    count: int, threshold: int
) -> None:
    """Each node is lost before one of the five stages, or never: 6^4 = 1,296 ways for 4 nodes.

    Of 5 nodes at most 2 are lost, in 1 + 5 · 5 + 10 · 25 = 276 ways: with more, fewer than t are left.
    """
    most = count if count == 4 else 2
    lost_sets = chain.from_iterable(combinations(names(count), size) for size in range(most + 1))
    tried, given, known = 0, vectors(count, 2), identities(count)
    for lost in lost_sets:
        for stages in product(range(5), repeat=len(lost)):
            tried += 1
            fate = dict(zip(lost, stages, strict=True))

            def deliver(_: int, stage: str, name: str, step: Any, fate: dict[str, int] = fate) -> Any:
                return step() if fate.get(name, 5) > STAGES.index(stage) else None

            call = call_of(count, threshold, length=2)
            if count - len(lost) < threshold:
                with pytest.raises(TooFew):
                    run_attempt(call, nodes(count), given, known, deliver)
                continue
            total, survivors = run_attempt(call, nodes(count), given, known, deliver)
            due = {name for name in names(count) if fate.get(name, 5) > STAGES.index("vectors")}
            assert survivors == due
            assert total.tolist() == plain(given, due).tolist()
    assert tried == {4: 1296, 5: 276}[count]


def test_below_the_threshold_the_round_is_repeated_with_fresh_keys() -> None:
    sent, given = [], vectors(4)

    def deliver(attempt: int, stage: str, name: str, step: Any) -> Any:
        answer = step()
        if stage == "vectors":
            sent.append((attempt, name, answer.words))
            return None if attempt == 0 and name in ("n0", "n1") else answer
        return answer

    total, survivors = secure_sum(nodes(4), given, identities(4), 3, deliver=deliver)
    assert total.tolist() == plain(given).tolist()
    assert survivors == set(names(4))
    first, second = ({name: words for a, name, words in sent if a == attempt} for attempt in (0, 1))
    for name in names(4):
        assert not np.any(first[name] == second[name])


def test_a_sum_that_fails_in_every_attempt_is_one_line() -> None:
    def deliver(_: int, stage: str, name: str, step: Any) -> Any:
        return None if name in ("n0", "n1") else step()

    with pytest.raises(TooFew) as caught:
        secure_sum(nodes(4), vectors(4), identities(4), 3, deliver=deliver)
    assert str(caught.value) == (
        "round 0 has no secure sum after 3 attempts: 2 of 4 nodes are left for sharing, and 3 are needed"
    )


def test_masks_of_two_attempts_share_no_block() -> None:
    """The vectors are zeros, so that what is sent is masks: no block of 64 bytes occurs twice in ten attempts."""
    blocks: list[bytes] = []
    parties, zeros = nodes(4), {name: np.zeros(80, np.uint64) for name in names(4)}

    def deliver(_: int, stage: str, name: str, step: Any) -> Any:
        answer = step()
        if stage == "vectors":
            blocks.extend(answer.words.tobytes()[at : at + 64] for at in range(0, 640, 64))
        return answer

    for round_idx in range(10):
        total, _ = secure_sum(parties, zeros, identities(4), 3, round_idx, "r", deliver=deliver)
        assert not total.any()
    assert len(set(blocks)) == len(blocks) == 10 * 4 * 10


# ---------------------------------------------------------------------- bad nodes


def unmasked(attempt: Attempt) -> dict[str, Any]:
    return {name: attempt.nodes[name].answer(message) for name, message in attempt.messages.items()}


def other(share: bytes) -> bytes:
    return share[:-1] + bytes([share[-1] ^ 1])


def test_a_wrong_share_is_found_by_the_commitment_and_others_are_taken() -> None:
    attempt = Attempt(4, 3, "consents")
    answers = unmasked(attempt)
    own = answers["n0"]
    answers["n0"] = Unmasking({name: other(share) for name, share in own.seeds.items()}, own.keys)
    assert attempt.server.total(answers).tolist() == plain(attempt.given).tolist()
    del answers["n3"]  # now no three right shares are left
    with pytest.raises(Refusal, match=r"^the seed of node n0 does not follow from its shares: a node gave a wrong one"):
        attempt.server.total(answers)


def test_a_wrong_share_of_a_lost_nodes_key_is_found_by_its_public_key() -> None:
    attempt = Attempt(5, 4, "consents", lost=("n4",))
    answers = unmasked(attempt)
    answers["n0"] = replace(answers["n0"], keys={"n4": other(answers["n0"].keys["n4"])})
    with pytest.raises(Refusal, match="the key of node n4 does not follow"):
        attempt.server.total(answers)


def test_a_wrong_mask_spoils_the_sum_and_is_not_found() -> None:
    """The limit of the protocol: a node may send any vector, as it may train on any data."""
    attempt = Attempt(4, 3, "shares")
    answers: dict[str, Any] = {name: attempt.nodes[name].answer(one) for name, one in attempt.messages.items()}
    answers["n0"].words[:] += np.uint64(1)
    consents = {n: attempt.nodes[n].answer(one) for n, one in attempt.server.vectors(answers).items()}
    last = {n: attempt.nodes[n].answer(one) for n, one in attempt.server.consents(consents).items()}
    assert attempt.server.total(last).tolist() == (plain(attempt.given) + np.uint64(1)).tolist()


def test_a_malformed_or_unsigned_answer_is_a_lost_node() -> None:
    attempt = Attempt(4, 3, "keys")
    answers: dict[str, Any] = {name: attempt.nodes[name].answer(one) for name, one in attempt.messages.items()}
    answers["n0"] = Sealed({"n1": b"", "n2": b""}, bytes(32))  # none for n3
    relayed = attempt.server.shares(answers)
    assert set(relayed) == {"n1", "n2", "n3"}
    masked: dict[str, Any] = {name: attempt.nodes[name].answer(one) for name, one in relayed.items()}
    survivors = attempt.server.vectors(masked)
    consents: dict[str, Any] = {name: attempt.nodes[name].answer(one) for name, one in survivors.items()}
    consents["n1"] = Consent(consents["n2"].signature)
    with pytest.raises(TooFew, match="2 of 4 nodes are left for consent, and 3 are needed"):
        attempt.server.consents(consents)


def test_a_late_answer_to_an_earlier_step_is_a_lost_node() -> None:
    attempt = Attempt(4, 3, "vectors")
    consents: dict[str, Any] = {name: attempt.nodes[name].answer(one) for name, one in attempt.messages.items()}
    consents["n0"] = attempt.answers["n0"]  # its vector once more
    assert set(attempt.server.consents(consents)) == {"n1", "n2", "n3"}
