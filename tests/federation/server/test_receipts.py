"""What nodes sign is in the record, and each has its receipts, whatever is lost; a node that lies fails alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed.callbacks import Checkpoint
from lit_fed.codecs import CastCodec
from lit_fed.federation.keys.statements import read_certificates
from lit_fed.federation.messages.wire import Message, decode, encode
from lit_fed.federation.node.node import Node
from lit_fed.federation.secure.messages import TooFew
from lit_fed.federation.transport.grid import Reply
from lit_fed.methods import FedAvg, FedBuff, Scaffold
from lit_fed.participation import Asynchronous, Stragglers, UniformParticipation
from lit_fed.privacy import ClientLevel, SecureSum
from lit_fed.record.check import Check
from lit_fed.record.signed import Signatures, SiteReceipts
from tests.federation.signing_support import HOMES, Keys, SignedGrid, made_keys, nodes_with, signed_run, themselves
from tests.federation.support import Make, Parts, deploy, simulate, small, written
from tests.record.test_callback import lines_of, rounds_of
from tests.support import Neighbours, Points, Wanderer, assert_same, trainer, weights


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return made_keys(tmp_path_factory.mktemp("federation"))


LATE = Stragglers(deadline=2.5, speed_sigma=0.0, seconds_per_sample=1.0, late="next_round")
SETTINGS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": dict,
    "few": lambda: {"participation": UniformParticipation(2)},
    "codec": lambda: {"uplink_codec": CastCodec("float16"), "downlink_codec": CastCodec("float16")},
    "late": lambda: {"participation": UniformParticipation(4, dropout_before=0.2, stragglers=LATE)},
    "secure sum": lambda: {"secure_sum": SecureSum(3, 8.0)},
    "seldom a checkpoint": lambda: {"callbacks": [Checkpoint(every_n_rounds=3)]},
    "no checkpoint": lambda: {"enable_checkpointing": False},
    "asynchronous": lambda: {"participation": Asynchronous(concurrency=3, buffer=2)},
}


def make(name: str, rounds: int = 4) -> Make:
    method = FedBuff if name == "asynchronous" else Scaffold
    return lambda folder: small(
        data=lambda: Points(4, sizes=(2, 3)),
        algorithm=method,
        record=True,
        **{"max_rounds": rounds, **SETTINGS[name]()},
    )(folder)


def addressing(folder: Path) -> Parts:
    torch.manual_seed(0)
    made = trainer(folder, max_rounds=4, record=True)
    return Parts(made, Wanderer(), Points(4, sizes=(2, 3)), Neighbours())


def counted(made: Any, folder: Path, keys: Keys, alone: bool = False) -> tuple[int, int]:
    """The statements of a record without a fault and the receipts of all sites, which name each of them."""
    authorities = read_certificates("--ca", keys.ca)
    record = Signatures(Check(made.log_dir / "record.jsonl" if alone else made.log_dir), authorities)
    assert [*record.check.run(), *record.faults()] == []
    found = list[Any]()
    for place in range(len(HOMES)):
        path = folder / f"node_{place}/states/receipts.jsonl"
        if path.exists():
            site = SiteReceipts(path, authorities)
            assert list(site.faults(record)) == []
            assert all({*one["statement"]["clients"]} <= {*HOMES[place]} for one in site.receipts)
            found += site.receipts
    return record.count, len({(one["statement"]["round"], *one["statement"]["clients"]) for one in found})


@pytest.mark.parametrize("name", [*SETTINGS, "addressing"])
def test_every_statement_is_in_the_record_and_has_its_receipt(name: str, keys: Keys, tmp_path: Path) -> None:
    made = signed_run(addressing if name == "addressing" else make(name), keys, tmp_path)
    count, receipts = counted(made, tmp_path, keys)
    assert count == receipts > 0
    assert counted(made, tmp_path, keys, alone=True) == (count, receipts)
    if name == "plain":  # four rounds of four clients
        assert count == 16
    if name == "secure sum":  # of three nodes
        assert count == 12


def test_the_weights_are_those_without_signatures(keys: Keys, tmp_path: Path) -> None:
    made = signed_run(make("plain"), keys, tmp_path / "signed")
    one = simulate(make("plain"), tmp_path / "one")
    assert_same(weights(made), weights(one))
    signed, plain = rounds_of(tmp_path / "signed"), rounds_of(tmp_path / "one")
    assert [line["updates"] for line in signed] == [line["updates"] for line in plain]


def test_a_sums_line_has_what_each_node_says_that_it_sent_and_nothing_of_a_client(keys: Keys, tmp_path: Path) -> None:
    signed_run(make("secure sum"), keys, tmp_path)
    line = next(one for one in lines_of(tmp_path) if "server" in one)
    assert {tuple(one["clients"]) for one in line["signed"].values()} == {tuple(home) for home in HOMES}
    assert line["signed"].keys() == {key.name for key in keys.sites}
    assert len({one["sent"] for one in line["signed"].values()} | {line["sum"]}) == 4
    assert all(told == {"summed": 1} for told in line["updates"].values())


def test_without_a_record_no_message_has_another_field(keys: Keys, tmp_path: Path) -> None:
    """With keys, too: the fields are those of messages before there were signatures."""
    heard = dict[str, set[str]]()

    def overheard(nodes: list[Node]) -> Mapping[int, Any]:
        def listening(node: Node) -> Callable[[bytes], Any]:
            def handle(blob: bytes) -> Any:
                asked, answer = decode(blob), node.handle(blob)
                heard[asked.word] = set(asked.fields)
                heard[f"{asked.word} answered"] = set(decode(answer).fields)
                return answer

            return handle

        return {place + 1: listening(node) for place, node in enumerate(nodes)}

    signed_run(small(data=lambda: Points(4), max_rounds=2), keys, tmp_path, handlers=overheard)
    work = {"client", "round", "run", "boot", "version", "drop", "together", "frozen"}
    answer = {"client", "round", "silent", "sums", "weight", "metrics", "version"}
    assert (heard["train"], heard["train answered"]) == (work, answer)
    assert (heard["ask"], heard["ask answered"]) == (work | {"protocol", "subset"}, answer)
    assert heard["keep"] == {"run", "round", "versions", "frozen"}
    assert "receipts" not in heard


def test_without_tls_and_where_a_private_run_withholds_nobody_signs_and_both_say_so(
    keys: Keys, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = list[str]()
    deploy(make("plain", 2), tmp_path / "open", HOMES, own={"say": said.append})
    why = "without --ca, --certificate and --key nodes sign nothing, and get no receipts"
    assert sum(why in line for line in said) == len(HOMES)
    assert capsys.readouterr().out.count(why) == 1
    assert not any("signed" in line for line in lines_of(tmp_path / "open"))
    pytest.importorskip("dp_accounting")
    settings = {"privacy": ClientLevel(clip_norm=1.0, noise_multiplier=1.0, withhold=True), "record": True}
    uniform = small(data=lambda: Points(4), algorithm=lambda: FedAvg(weighting="uniform"), max_rounds=2, **settings)
    open_nodes = small(data=lambda: Points(4), algorithm=lambda: FedAvg(weighting="uniform"), max_rounds=2, record=True,
                       privacy=ClientLevel(clip_norm=1.0, noise_multiplier=1.0))  # fmt: skip
    nodes = nodes_with(open_nodes, keys, tmp_path / "private")  # which do not know what the server withholds
    signed_run(uniform, keys, tmp_path / "private", nodes=nodes)
    assert "what nodes sign is not kept, as trainer.privacy withholds who takes part" in capsys.readouterr().out
    text = (tmp_path / "private/lightning_logs/version_0/record.jsonl").read_text()
    assert not [word for word in ("signed", "certificates", "cohort") if f'"{word}"' in text]
    assert not list((tmp_path / "private").rglob("receipts.jsonl"))


# ---------------------------------------------------------------------- losses and kills


class Killed(BaseException):
    """The server is gone, without a word."""


class KillingGrid(SignedGrid):
    """Kills an end when a message comes by."""

    who, at = "", 0

    def pull(self, message_ids: Collection[str]) -> Iterator[Reply]:
        for message_id in list(message_ids)[:1]:
            self.at -= 1
            node = self._waiting[message_id][0]
            if self.at == 0 and self.who == "server":
                raise Killed
            if self.at == 0 and self.who == "lost":  # the node has kept it, and its answer is lost
                list(super().pull([message_id]))
                yield Reply(message_id, b"", "it was lost")
                return
            if self.at == 0:
                self.handlers[node] = again(node)
            yield from super().pull([message_id])


again: Any = None

random.seed(83)
KILLS = [(name, who, random.randint(6, 40)) for name in SETTINGS for who in ("server", "server", "lost", "node")]


@pytest.mark.parametrize(
    ("name", "who", "at"),
    [pytest.param(*kill, marks=[pytest.mark.long] if place % 4 else []) for place, kill in enumerate(KILLS)],
)
def test_killed_anywhere_and_resumed_there_is_no_false_alarm(
    name: str, who: str, at: int, keys: Keys, tmp_path: Path
) -> None:
    if name == "no checkpoint":
        pytest.skip("there is nothing to resume from")
    stack = ExitStack()

    def restarted(number: int) -> Any:
        node = nodes_with(make(name), keys, tmp_path)[number - 1]
        return stack.enter_context(node.at_work()).handle

    globals()["again"] = restarted
    grid: Any = type("Once", (KillingGrid,), {"who": who, "at": at})
    tolerant = lambda folder: _tolerant(make(name)(folder))  # noqa: E731
    with stack:
        try:
            made = signed_run(tolerant, keys, tmp_path, grid=grid)
        except (Killed, TooFew):  # a node that is killed before a sum has lost its work, and the others are too few
            made = signed_run(tolerant, keys, tmp_path, ckpt_path="last")
    count, receipts = counted(made, tmp_path, keys)
    assert count == receipts


def _tolerant(parts: Parts) -> Parts:
    parts.trainer.settings = replace(parts.trainer.settings, on_client_failure="skip")
    return parts


def test_a_resume_from_an_earlier_checkpoint_gives_other_receipts_of_the_same_statements(
    keys: Keys, tmp_path: Path
) -> None:
    def keeping(folder: Path) -> Parts:
        return small(
            data=lambda: Points(4), algorithm=Scaffold, max_rounds=4, record=True, callbacks=[Checkpoint(keep_last=9)]
        )(folder)

    first = signed_run(keeping, keys, tmp_path)
    path = str(first.log_dir / "checkpoints/round=1.ckpt")
    made = signed_run(keeping, keys, tmp_path, ckpt_path=path)
    assert made.log_dir != first.log_dir
    assert counted(made, tmp_path, keys) == (16, 16)


# ---------------------------------------------------------------------- a node that lies

Lie = Callable[[Message, list[Message]], Message]


def fields(**changes: Any) -> Lie:
    return lambda answer, _: replace(answer, fields={**answer.fields, **changes})


def replayed(answer: Message, before: list[Message]) -> Message:
    """The signature of the round before."""
    return replace(answer, fields={**answer.fields, "signature": before[0].fields["signature"]})


def unsigned(answer: Message, _: list[Message]) -> Message:
    return replace(answer, fields={name: one for name, one in answer.fields.items() if name != "signature"})


def other_tensors(answer: Message, _: list[Message]) -> Message:
    moved = {name: tensor + 1 for name, tensor in answer.tensors["payload"].items()}
    return replace(answer, tensors={"payload": moved})


def other_weight(answer: Message, _: list[Message]) -> Message:
    return replace(answer, fields={**answer.fields, "weight": float(answer.fields["weight"])})


WRONG = "the node of client 0 has not signed what it received and sent; its answer is dropped"
MALFORMED = "is malformed; run the same lit_fed on both ends"


@pytest.mark.parametrize(
    ("lie", "named"),
    [
        (fields(signature="00" * 100), WRONG),
        (fields(signature="0" * 10_000), "string of more than"),
        (fields(signature="30" * 300), MALFORMED),
        (fields(signature=7), MALFORMED),
        (unsigned, MALFORMED),
        (replayed, WRONG),
        (other_tensors, WRONG),
        (other_weight, WRONG),
    ],
    ids=["forged", "huge", "oversized", "a number", "none", "replayed", "other tensors", "another weight"],
)
def test_a_node_that_signs_anything_else_fails_alone(lie: Lie, named: str, keys: Keys, tmp_path: Path) -> None:
    before = list[Message]()

    def lying(nodes: list[Node]) -> Mapping[int, Any]:
        def handle(blob: bytes) -> Any:
            answer = decode(nodes[0].handle(blob))
            if "signature" in answer.fields:
                before.append(answer)
                if len(before) > 1:
                    return written(lie(answer, before))
            return encode(answer)

        return {**themselves(nodes), 1: handle}

    made = signed_run(lambda folder: _tolerant(make("plain", 3)(folder)), keys, tmp_path, handlers=lying)
    (cause,) = made.run.failures.causes
    assert named in cause
    assert made.run.failures.count == 2  # client 0, in rounds 1 and 2
    assert counted(made, tmp_path, keys) == (10, 10)
    signed = [line["signed"].keys() for line in lines_of(tmp_path) if "server" in line]
    assert signed == [{"0", "1", "2", "3"}, {"1", "2", "3"}, {"1", "2", "3"}]


def test_a_statement_by_another_nodes_key_or_of_another_client_is_refused(keys: Keys, tmp_path: Path) -> None:
    """Node 1 signs by node 2's key, and then with its own as client 3."""
    nodes = nodes_with(make("plain", 3), keys, tmp_path)
    assert nodes[0].receipts is not None
    own, turns = nodes[0].receipts, [0]
    honest = type(own).signature

    def signature(due: Mapping[str, Any], payload: Any) -> str:
        turns[0] += 1
        if turns[0] == 2:
            assert nodes[1].receipts is not None
            return honest(nodes[1].receipts, due, payload)
        return honest(own, {**due, "clients": [3]} if turns[0] == 3 else due, payload)

    own.signature = signature  # type: ignore[method-assign]
    made = signed_run(lambda folder: _tolerant(make("plain", 3)(folder)), keys, tmp_path, nodes=nodes)
    assert made.run.failures.causes == {WRONG: 2}
    assert counted(made, tmp_path, keys) == (10, 10)


def test_a_vector_that_is_not_signed_loses_its_node(keys: Keys, tmp_path: Path) -> None:
    """Two of three nodes are left, and the threshold is three."""

    def lying(nodes: list[Node]) -> Mapping[int, Any]:
        def handle(blob: bytes) -> Any:
            answer = decode(nodes[0].handle(blob))
            more = {"signature": "00" * 50} if "signature" in answer.fields else {}
            return encode(replace(answer, fields={**answer.fields, **more}))

        return {**themselves(nodes), 1: handle}

    with pytest.raises(TooFew, match=r"round 0 has no secure sum after 3 attempts: .*2 of 3"):
        signed_run(make("secure sum"), keys, tmp_path, handlers=lying)
