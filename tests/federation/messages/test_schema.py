"""Each word's fields have types and bounds, all of them are required, and there are no others."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from lit_fed.errors import WireError
from lit_fed.federation.messages import schema
from lit_fed.federation.messages.wire import Message, decode, encode
from lit_fed.federation.secure import messages as protocol
from lit_fed.federation.secure.messages import Refusal
from lit_fed.federation.secure.packed import SumCall, pack, unpack

RUN, HASH = "0" * 16, "a" * 64
CALL = protocol.Invitation("r", 0, 1, ("a", "b"), 2, 5, "", None)
OF_WORK = {"run": RUN, "round": 0, "client": 3, "boot": "ab", "version": (0, 7), "drop": [1], "together": [3, 4]}
OF_SUM: dict[str, Any] = {
    "run": RUN,
    "round": 1,
    "work": "ask",
    "protocol": "clients",
    "subset": "test",
    "clients": [0],
}
REPORT = schema.DataReport(3, (1, 2), HASH, "unit")
EVERY: list[Any] = [
    schema.Hello(4, "0.1.0", {"trainer.seed": "0"}, HASH),
    schema.ListStates(RUN),
    schema.Train(**OF_WORK, frozen={"w": HASH}),
    schema.Ask(**OF_WORK, frozen={}, protocol="clients", subset="test"),
    schema.Keep(RUN, 4, {"0": None, "1": (3, 2**32 - 1)}, {"model": {"w": HASH}}),
    schema.AskStatistics(-1, "ab", 6, 5),
    schema.SumOffer(stage="offer", **OF_SUM),
    SumCall(stage="keys", call=CALL, names=["acc"], grid=0.5, deviation=3, nodes={"a": "00"}, **OF_SUM),
    schema.SumStep("shares", {"keys": []}),
    schema.Failure("a cause"),
    schema.WorkFailure("a cause", 0, 1, True, {"acc": ((0.5,), 1)}),
    schema.NodeAnswer(),
    schema.Greeted("ab", {"0": REPORT}, True, 3, 2**20, {"model": {"w": HASH}}),
    schema.States([("0", 4)]),
    schema.WorkAnswer(0, 1, False, {"acc": ((0.5, 0.25), 2)}, 3, {"acc": 0.5, "n": 2}, None),
    schema.SignedAnswer(0, 1, False, {}, 3, {}, None, "3065" * 40),
    schema.SiteAnswer(2),
    schema.SumAnswer({"signature": ""}),
    schema.SignedSumAnswer({}, "3065" * 40),
    schema.Receipts(RUN, ["-----BEGIN CERTIFICATE-----"], [{"round": 1, "statement": {"clients": [2]}}]),
]
IN_SUMS: list[Any] = [
    CALL,
    protocol.AllKeys((protocol.SignedKeys("a", bytes(32), bytes(32), 3, b"x"),)),
    protocol.SignedKeys("a", bytes(32), bytes(32), 3, b"x"),
    protocol.Sealed({"b": b"x"}, bytes(32)),
    protocol.Relayed({"b": b"x"}, ("a", "b")),
    protocol.Survivors(("a", "b")),
    protocol.Consent(b"x"),
    protocol.Consents({"a": b"x"}),
    protocol.Unmasking({"a": bytes(66)}, {}),
    schema.Offered(["acc"], "00"),
]


def name_of(one: Any) -> str:
    return type(one).__name__


def content(one: Any) -> dict[str, Any]:
    """The fields as on the wire."""
    found: dict[str, Any] = json.loads(json.dumps(msgspec.to_builtins(one)))
    return found


@pytest.mark.parametrize("one", EVERY, ids=name_of)
def test_every_message_is_read_as_it_was_written(one: Any) -> None:
    assert decode(encode(Message.pack(one))).read(type(one)) == one


@pytest.mark.parametrize("one", IN_SUMS, ids=name_of)
def test_every_message_of_a_sum_is_read_as_it_was_written(one: Any) -> None:
    fields, tensors = pack(one)
    assert unpack(type(one), json.loads(json.dumps(fields)), tensors) == one


def test_every_class_is_among_those() -> None:
    def under(kind: type) -> set[type]:
        return {kind}.union(*map(under, kind.__subclasses__()))

    abstract = {schema.Content, schema.RoundRequest, schema.ClientWork}
    assert under(schema.Content) - abstract == {type(one) for one in EVERY}


@pytest.mark.parametrize("one", EVERY, ids=name_of)
def test_every_field_is_required_and_of_one_type(one: Any) -> None:
    for name in content(one):
        without = {key: value for key, value in content(one).items() if key != name}
        with pytest.raises(WireError, match=f"is malformed; run the same lit_fed on both ends .*field `{name}`"):
            Message(one.word, without).read(type(one))
        if name not in ("message", "weight"):  # of which their readers say more
            odd = "0.5" if name in ("grid", "deviation") else 0.5
            with pytest.raises(WireError, match=rf"is malformed; .*`\$\.{name}`"):
                Message(one.word, {**content(one), name: odd}).read(type(one))


@pytest.mark.parametrize("one", IN_SUMS, ids=name_of)
def test_every_field_of_a_message_of_a_sum_is_required_and_of_one_type(one: Any) -> None:
    for name in content(one):
        for odd in ({key: value for key, value in content(one).items() if key != name}, {**content(one), name: 0.5}):
            with pytest.raises(Refusal, match=f"a message {name_of(one)} of the secure sum is malformed"):
                unpack(type(one), odd, {})


def test_no_field_has_a_default() -> None:
    for one in [*EVERY, schema.Offered([], "")]:
        assert not type(one).__struct_defaults__, one


@pytest.mark.parametrize("one", EVERY, ids=name_of)
def test_a_field_that_the_class_lacks_is_refused(one: Any) -> None:
    """But of another version's hello, which is refused by its version, and of a failure, whose cause is told."""
    for name in ("more", "\x1b\ud800"):
        more = Message(one.word, {**content(one), name: 1})
        if type(one) in (schema.Hello, schema.Failure) and name == "more":
            assert more.read(type(one)) == one
        else:
            with pytest.raises(WireError) as caught:
                more.read(type(one))
            assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("kind", "odd"),
    [
        (schema.ListStates, {"run": RUN + "\n"}),
        (schema.Train, {"version": [1]}),
        (schema.Train, {"version": [1, 2, 3]}),
        (schema.Train, {"version": [-1, 0]}),
        (schema.Train, {"version": [0, 2**32]}),
        (schema.Train, {"version": [0, True]}),
        (schema.Train, {"drop": [0] * 1001}),
        (schema.Train, {"frozen": {"w": "A" * 64}}),
        (schema.Train, {"protocol": "clients"}),
        (schema.Ask, {"protocol": "a/b"}),
        (schema.Ask, {"protocol": "x" * 101}),
        (schema.Keep, {"frozen": {"model": {"w": ""}}}),
        (schema.AskStatistics, {"bins": 0}),
        (schema.SumOffer, {"work": "keep"}),
        (schema.SumOffer, {"clients": ["0"]}),
        (SumCall, {"nodes": {"a": "0" * 1025}}),
        (SumCall, {"nodes": {str(place): "" for place in range(1001)}}),
        (SumCall, {"names": ["x"] * 1001}),
        (schema.SumStep, {"stage": "last"}),
        (schema.Greeted, {"boot": "x"}),
        (schema.Greeted, {"smallest_sum": -1}),
        (schema.States, {"held": [["1", 0]] * 70_000}),
        (schema.WorkAnswer, {"sums": {"acc": [[1.0], -1]}}),
        (schema.WorkAnswer, {"sums": {"acc": [[1.0] * 65, 1]}}),
        (schema.WorkAnswer, {"sums": {"acc": 3.0}}),
    ],
)  # fmt: skip
def test_a_field_beyond_its_bounds_is_refused(kind: Any, odd: dict[str, Any]) -> None:
    (good,) = (content(one) for one in EVERY if type(one) is kind)
    Message(kind.word, good).read(kind)
    with pytest.raises(WireError, match=f"a message {kind.word!r} is malformed; run the same lit_fed on both ends"):
        Message(kind.word, {**good, **odd}).read(kind)


def test_another_word_than_is_due_is_refused() -> None:
    with pytest.raises(WireError, match="a message is 'hello', and 'held' is due"):
        Message("hello", {"run": RUN}).read(schema.ListStates)


def test_a_round_has_one_training_whatever_question_a_server_names_beside_it() -> None:
    trained = schema.Train(**OF_WORK, frozen={}).request([0])
    summed = schema.SumOffer(stage="offer", **{**OF_SUM, "work": "train", "round": 0}).request([0])
    assert summed == trained
    assert schema.SumOffer(stage="offer", **OF_SUM).request([0]).name == f"{RUN}/ask/clients/test"
    with pytest.raises(WireError, match="the list of clients of a request is malformed"):
        schema.SumOffer(stage="offer", **OF_SUM).request([0, 0])
