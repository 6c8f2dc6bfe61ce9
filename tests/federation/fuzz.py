"""Mutates valid messages of every kind, both ways, and looks that each ends as its sender's failure or is a message.

A federation of two honest nodes and one that lies runs in this process. Whatever the third answers, to every word that
there is, is mutated; so is whatever a server says to a node:
``python -m tests.federation.fuzz --cases 10000 --seed 3``.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import math
import random
import resource
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from msgspec import inspect

from lit_fed.callbacks import Callback
from lit_fed.engine.loop.run import Run
from lit_fed.federation.messages import schema
from lit_fed.federation.messages.wire import PROTOCOL, Message, decode, encode
from lit_fed.federation.node import node as node_module
from lit_fed.federation.node.node import Node
from lit_fed.federation.secure.packed import SumCall
from lit_fed.federation.server import federate as server
from lit_fed.federation.server import roster
from lit_fed.federation.server.federate import Parting, federate
from lit_fed.federation.transport.grid import MemoryGrid
from tests.federation.support import blob_of, nodes_of, small
from tests.support import Points, weights

MOST_S = 2.0
"""Of CPU time that one case may take: the largest message here, of 20 MiB, is read in some 0.1 s."""
MOST_MB = 400.0
"""By which the process may grow."""
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 2**31, 2**53, 2**63, 2**64, 10**400, -(10**400), 0.5, -0.0, 1e-320, 1e300, -1e300,
    math.nan, math.inf, -math.inf, "", "0", "9" * 5000, "x" * 100_000, "\x1b[31m\x07\x00", "\u202e\ud800", "../../x",
    "__class__", "global/acc", "=1+1", [], {}, [[]], [None], [0] * 1000, [[[[[[[[[[[[]]]]]]]]]]]], {"": {}}, ["1", 0],
    {"train/loss": 1.0}, {"train/loss": [[1.0], 1]}, {str(one): one for one in range(2000)}, "answer", "failure",
]  # fmt: skip


class Fuzzer:
    """Mutates messages.

    Args:
        seed: Of all that is drawn.
        cases: How many messages are mutated.
    """

    def __init__(self, seed: int, cases: int) -> None:
        self.random = random.Random(seed)
        self.cases = cases
        self.done: Counter[str] = Counter()
        self.slowest = 0.0

    @property
    def count(self) -> int:
        """How many messages have been mutated."""
        return self.done.total()

    def mutate(self, blob: bytes | bytearray) -> bytes:
        """Another message, made of a valid one."""
        ways = [self._bytes, self._header, self._header, self._schema, self._schema, self._tensors, self._bomb]
        how = self.random.choice(ways)
        self.done[how.__name__.strip("_")] += 1
        return how(bytes(blob))

    def _bytes(self, blob: bytes) -> bytes:
        """Some of its bytes changed, lost, doubled or made up."""
        changed = bytearray(blob)
        for _ in range(self.random.choice([1, 1, 2, 8])):
            at = self.random.randrange(len(changed) + 1)
            until = min(len(changed), at + self.random.choice([0, 1, 4, 64, len(changed)]))
            changed[at:until] = self.random.choice(
                [
                    b"",
                    self.random.randbytes(until - at),
                    self.random.randbytes(9),
                    b"\xff" * 8,
                    bytes(changed[at:until]) * 2,
                ]
            )
            if not changed:
                break
        return bytes(changed)

    def _header(self, blob: bytes) -> bytes:
        """Some of what stands in its header changed, lost or added."""
        header, body = parted(blob)
        for _ in range(self.random.choice([1, 1, 1, 2, 5])):
            header = self._changed(header)
        return blob_of(json.dumps(header).encode(), body)

    def _changed(self, header: Any) -> Any:
        whole = {"": copy.deepcopy(header)}
        place: Any = whole
        key: Any = ""
        if isinstance(header, dict) and isinstance(header.get("fields"), dict) and self.random.random() < 0.8:
            place, key = whole[""], "fields"  # what is looked at most, and where there is most to look at
        while True:
            inside = place[key]
            keys = (
                list(inside)
                if isinstance(inside, dict)
                else list(range(len(inside)))
                if isinstance(inside, list)
                else []
            )
            if not keys or (place is not whole and key != "fields" and self.random.random() < 0.2):
                break
            place, key = inside, self.random.choice(keys)
        how = self.random.randrange(4)
        if how == 0 and place is not whole:
            del place[key]
        elif how == 1 and isinstance(place, dict):
            place[self.random.choice([one for one in ODD if isinstance(one, str)])] = self.random.choice(ODD)
        elif how == 2 and isinstance(place, dict) and len(place) > 1:
            other = self.random.choice(list(place))
            place[key], place[other] = place[other], place[key]
        else:
            alike = [one for one in ODD if type(one) is type(place[key])]
            place[key] = copy.deepcopy(self.random.choice(alike if alike and self.random.random() < 0.5 else ODD))
        return whole[""]

    def _schema(self, blob: bytes) -> bytes:
        """Some of its fields drawn anew, of their types in the schema, at their bounds and one beyond."""
        header, body = parted(blob)
        (kind,) = (one for one in KINDS if one.word == header["word"] and set(names_of(one)) == header["fields"].keys())
        for field in self.random.sample(fields := inspect.type_info(kind).fields, min(len(fields), 2)):
            header["fields"][field.encode_name] = self.drawn(field.type)
        return blob_of(json.dumps(header).encode(), body)

    def drawn(self, kind: Any) -> Any:
        """A value of a type of `msgspec.inspect`, or just beyond its bounds."""
        draw = self.random.choice
        match kind:
            case inspect.UnionType():
                return self.drawn(draw(kind.types))
            case inspect.LiteralType():
                return draw([*kind.values, "none"])
            case inspect.IntType():
                low = -(2**63) if kind.ge is None else kind.ge
                high = 2**63 if kind.lt is None else kind.lt
                return draw([low - 1, low, 0, 1, 2, high - 1, high])
            case inspect.StrType() | inspect.BytesType():
                count = draw([0, 1, 16, 32, 64, 100, kind.max_length or 64, (kind.max_length or 64) + 1])
                return draw([draw("0aA/é+") * count, "0" * count])
            case inspect.ListType() | inspect.VarTupleType():
                return [self.drawn(kind.item_type) for _ in range(self.size(kind))]
            case inspect.TupleType():
                return [self.drawn(one) for one in kind.item_types][: draw([1, 2, 2, 2])]
            case inspect.DictType():
                return {str(self.drawn(kind.key_type)): self.drawn(kind.value_type) for _ in range(self.size(kind))}
            case inspect.StructType() | inspect.DataclassType():
                return {one.encode_name: self.drawn(one.type) for one in kind.fields}
        return draw([True, False, None] if isinstance(kind, inspect.BoolType | inspect.NoneType) else ODD)

    def size(self, kind: Any) -> int:
        """Of a list or a mapping."""
        return self.random.choice([0, 1, 2, 3, min(kind.max_length or 3, 2000), min(kind.max_length or 3, 2000) + 1])

    def _tensors(self, blob: bytes) -> bytes:
        """Its tensors of other values, types, shapes or numbers; or of another header."""
        header, body = parted(blob)
        if self.random.random() < 0.3:
            length = struct.unpack("<Q", body[:8])[0]
            text = json.dumps(self._changed(json.loads(body[8 : 8 + length]))).encode()
            return blob_of(json.dumps(header).encode(), struct.pack("<Q", len(text)) + text + body[8 + length :])
        tensors = safetensors.torch.load(body)
        dtypes = [
            torch.float64,
            torch.float16,
            torch.bfloat16,
            torch.int64,
            torch.bool,
            torch.complex64,
            torch.float8_e5m2,
        ]
        for name in list(tensors) or ["0"]:
            tensor = tensors.get(name, torch.zeros(2))
            tensors[name] = self.random.choice(
                [
                    lambda one: one.to(self.random.choice(dtypes)),
                    lambda one: torch.full_like(one, self.random.choice([0, 1])),
                    lambda one: (
                        one * torch.tensor(self.random.choice([math.nan, math.inf, -1e30, 1e-30])).to(one.dtype)
                    ),
                    lambda one: one.reshape(-1),
                    lambda one: one.reshape(1, *one.shape),
                    lambda one: torch.zeros(2**40, 0),
                    lambda one: torch.zeros(100_000),
                ]
            )(tensor).contiguous()
        if self.random.random() < 0.3:
            tensors[self.random.choice(["7", "0", "x"])] = torch.zeros(3)
        if self.random.random() < 0.3 and tensors:
            del tensors[self.random.choice(list(tensors))]
        return blob_of(json.dumps(header).encode(), safetensors.torch.save(tensors))

    def _bomb(self, blob: bytes) -> bytes:
        """A header, or a list of tensors, that would cost much to parse."""
        header, body = parted(blob)
        count = self.random.choice([2**10, 2**16, 2**18, 2**20, 2**22])
        text = (
            self.random.choice([b"[],", b"{},", b"[", b'{"a":', b'"', b'\\"', b"9", b"0,", b"1e9,", b'"a",', b"\x00"])
            * count
        )
        how = self.random.randrange(3)
        if how == 0:
            return blob_of(self.random.choice([text, b"[" + text + b"0]", b'{"word":' + text]), body)
        if how == 1:
            return blob_of(json.dumps(header).encode(), struct.pack("<Q", len(text)) + text)
        return blob_of(json.dumps(header).encode()[:-1] + b',"x":[' + text + b"0]}", body)


def kinds_of(kind: Any) -> list[Any]:
    """Classes of messages."""
    return [kind, *(one for below in kind.__subclasses__() for one in kinds_of(below))]


def names_of(kind: Any) -> tuple[str, ...]:
    """Names of a class's fields."""
    return kind.__struct_fields__  # type: ignore[no-any-return]


KINDS = {SumCall, *kinds_of(schema.Content)} - {schema.Content, schema.RoundRequest, schema.ClientWork, schema.Failure}


def parted(blob: bytes) -> tuple[Any, bytes]:
    """A valid message's header, and the bytes of its tensors."""
    length = struct.unpack_from("<4sI", blob)[1]
    return json.loads(blob[8 : 8 + length]), blob[8 + length :]


# ---------------------------------------------------------------------- what a node says


class Stranger(MemoryGrid):
    """Also reaches ever new nodes, which are what one of the others is when it is asked who lives there.

    Args:
        handlers: What answers, by node.
        fuzzer: Mutates what they say.
        valid: What answers for them.
    """

    def __init__(
        self, handlers: Mapping[int, Callable[[bytes], bytes]], fuzzer: Fuzzer, valid: Callable[[bytes], bytes]
    ) -> None:
        super().__init__(handlers)
        self.fuzzer, self.valid, self.last = fuzzer, valid, 1000
        self.settled = False

    def nodes(self) -> Mapping[int, str]:
        """Its nodes, and a new one."""
        if self.settled and self.fuzzer.count < self.fuzzer.cases:
            self.handlers.pop(self.last, None)
            self.last += 1
            self.handlers[self.last] = lambda blob: self.fuzzer.mutate(self.valid(blob))
        return super().nodes()


class Curious(Callback):
    """Asks after every round what nodes hold, and that they keep its end; then nodes may come that nobody knows.

    Args:
        fuzzer: Says whether there is more to do.
        grid: Whose nodes they are.
    """

    def __init__(self, fuzzer: Fuzzer, grid: Stranger) -> None:
        self.fuzzer, self.grid, self.begun = fuzzer, grid, time.process_time()
        self.before = 0

    def on_round_end(self, run: Run, record: Any) -> None:
        """Ask, and look how long the round's cases took."""
        self.grid.settled = True
        with contextlib.suppress(StopIteration):
            (parting,) = (one for one in run.callbacks if isinstance(one, Parting))
            list(run.federation.executor._held())  # type: ignore[attr-defined]
            parting.on_fit_end(run)
        now, cases = time.process_time(), self.fuzzer.count - self.before
        self.fuzzer.slowest = max(self.fuzzer.slowest, now - self.begun)
        self.begun, self.before = now, self.fuzzer.count
        assert self.fuzzer.slowest < MOST_S * max(cases, 1), (
            f"a round of {cases} cases took {self.fuzzer.slowest:.1f} s"
        )
        run.should_stop = self.fuzzer.count >= self.fuzzer.cases


def fuzz_server(seed: int, cases: int, folder: Path) -> Fuzzer:
    """A run of which one node says mutated messages only, beside strangers who do.

    Raises:
        AssertionError: If the run ends, or takes what it should not.
    """
    fuzzer = Fuzzer(seed, cases)
    make = small(data=lambda: Points(num_clients=3), on_client_failure="skip", max_rounds=cases + 1, callbacks=[])
    nodes = nodes_of(make, folder, [[0], [1], [2]])
    made, *parts = make(folder)

    def lying(blob: bytes) -> bytes:
        message, answer = decode(blob), nodes[2].handle(blob)
        if message.word == "hello" or fuzzer.count >= cases:
            return answer
        if message.word in ("train", "ask") and fuzzer.random.random() < 0.2:
            client, round_idx = (message.fields[name] for name in ("client", "round"))
            answer = encode(Message.pack(schema.WorkFailure("a cause", client, round_idx, False, {})))
        return fuzzer.mutate(answer)

    grid = Stranger({1: nodes[0].handle, 2: nodes[1].handle, 3: lying}, fuzzer, nodes[2].handle)
    made.callbacks.append(Curious(fuzzer, grid))
    before = roster._AGAIN_S, server._PARTING_S, Node._count
    roster._AGAIN_S, server._PARTING_S = (1e9, 1e9), 1.0
    Node._count = lambda *_: None  # type: ignore[method-assign]  # the end is kept in every round here
    try:
        with ExitStack() as stack:
            for node in nodes:
                stack.enter_context(node.at_work())
            federate(grid, made, *parts)
    finally:
        roster._AGAIN_S, server._PARTING_S, Node._count = before  # type: ignore[method-assign]
    assert fuzzer.count >= cases, f"the run has ended after {fuzzer.count} of {cases} cases"
    assert all(torch.isfinite(tensor).all() for tensor in weights(made).values())
    return fuzzer


# ---------------------------------------------------------------------- what a server says


def fuzz_node(seed: int, cases: int, folder: Path) -> Fuzzer:
    """A node that is told mutated messages, and works as before after each.

    Raises:
        AssertionError: If it ends, or says what is no message.
    """
    fuzzer = Fuzzer(seed, cases)
    make = small(data=lambda: Points(num_clients=3), max_rounds=cases + 2)
    (node,) = nodes_of(make, folder, [[0, 1]])
    model = {"network.weight": torch.zeros(1, 2)}
    sent, work = {"payload": model, "frozen": {}}, {"client": 0, "run": "0" * 16, "boot": node.boot, "version": None}
    work |= {"drop": [], "together": [0], "frozen": {}}
    valid: dict[str, Callable[[int], Message]] = {
        "hello": lambda at: Message.pack(schema.Hello(PROTOCOL, "0.1.0", node.settings, "")),
        "held": lambda at: Message.pack(schema.ListStates("0" * 16)),
        "keep": lambda at: Message.pack(
            schema.Keep(f"{at:016x}", at, {"0": None, "1": None}, {}), {"payload/model": model, "frozen/model": {}}
        ),
        "train": lambda at: Message.pack(schema.Train(round=at, **work), sent),
        "ask": lambda at: Message.pack(schema.Ask(round=at, protocol="clients", subset="test", **work), sent),
    }

    most = node_module._MOST_RUNS
    node_module._MOST_RUNS = 2 * cases + 2  # a run's end is kept in every case here, each for another run
    with ExitStack() as stack:
        stack.callback(setattr, node_module, "_MOST_RUNS", most)
        stack.enter_context(node.at_work())
        expected = decode(node.handle(encode(valid["train"](cases)))).tensors["payload"]["network.weight"]
        for case in range(cases):
            for word in valid:
                assert decode(node.handle(encode(valid[word](case)))).word == "answer", word
            word = fuzzer.random.choice(list(valid))
            begun = time.process_time()
            answer = decode(node.handle(fuzzer.mutate(encode(valid[word](case)))))
            took = time.process_time() - begun
            fuzzer.slowest = max(fuzzer.slowest, took)
            assert took < MOST_S, f"case {case}, {word}, took {took:.1f} s"
            assert answer.word in ("answer", "failure")
            assert str(answer.fields.get("cause", "")).isprintable()
        given = decode(node.handle(encode(valid["train"](cases))))
        assert torch.equal(given.tensors["payload"]["network.weight"], expected)
    return fuzzer


def fuzz(seed: int, cases: int) -> str:
    """Half of the cases each way; what was done, in a line.

    Raises:
        AssertionError: If one ends otherwise, takes too long or too much memory, or what is printed is not plain.
    """
    printed = io.StringIO()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(printed):
        fuzz_node(seed, 5, Path(folder) / "first")  # what is imported late is no one's fault
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        there = fuzz_server(seed, cases - cases // 2, Path(folder) / "server")
        back = fuzz_node(seed, cases // 2, Path(folder) / "node")
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown < MOST_MB, f"memory has grown by {grown:.0f} MB"
    assert all(line.isprintable() for line in printed.getvalue().split("\n"))
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted((there.done + back.done).items()))
    return (
        f"seed {seed}: {there.count} answers and {back.count} orders, {kinds}; the slowest round took "
        f"{there.slowest:.2f} s, the slowest order {back.slowest:.2f} s, memory grew by {grown:.0f} MB"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=500, help="how many messages are mutated")
    parser.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    given = parser.parse_args()
    sys.stdout.write(fuzz(given.seed, given.cases) + "\n")
