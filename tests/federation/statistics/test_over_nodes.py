"""Statistics over nodes: every message crosses as bytes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from lit_fed.data import ClientArrays, Table
from lit_fed.errors import ConfigError, WireError
from lit_fed.federation.messages.wire import PROTOCOL, Message, decode, encode
from lit_fed.federation.server.roster import Gathering
from lit_fed.federation.statistics.federation import first_question, simulated, take_statistics
from lit_fed.federation.statistics.noise import Noise
from lit_fed.federation.statistics.over_nodes import (
    StatisticsNode,
    ask_message,
    ask_nodes,
    new_roster,
    pack,
    read_question,
    unpack,
)
from lit_fed.federation.statistics.report import Statistics
from lit_fed.federation.statistics.site import Inquiry, columns_of, empty, survey
from lit_fed.federation.statistics.withheld import withheld
from lit_fed.federation.transport.grid import MemoryGrid, Reply
from tests.command.support import error_of
from tests.federation.serving_support import free_address
from tests.federation.statistics.test_federation import table, write_table
from tests.federation.support import Clock, nodes_of, small
from tests.support import run_cli, start_cli

CONFIG = "data: {class_path: ClientArrays}"


def write_clients(root: Path, sizes: Sequence[int] = (30, 20, 4)) -> Path:
    """Pictures of bytes, of another size for each client."""
    drawn = np.random.default_rng(1)
    for client, size in enumerate(sizes):
        folder = root / f"client_{client}"
        folder.mkdir(parents=True)
        x, y = drawn.integers(0, 256, (size, 4, 4, 2), dtype=np.uint8), drawn.integers(0, 3, size)
        np.savez(folder / "data.npz", x_train=x, y_train=y, x_test=x[:2], y_test=y[:2])
    return root


def arrays(root: Path) -> ClientArrays:
    return ClientArrays(3, [2, 4, 4], 3, root=str(root))


def nodes(make: Callable[[], Any], homes: Sequence[Sequence[int]], **kwargs: Any) -> list[StatisticsNode]:
    quiet: dict[str, Any] = {"least": 1, "say": lambda line: None} | kwargs
    return [StatisticsNode(make(), clients, CONFIG, **quiet) for clients in homes]


def asked(
    make: Callable[[], Any], at: list[StatisticsNode], bins: int = 6, least: int = 1, ranges: Any = None,
    noise: Noise | None = None, together: bool = False, wrap: Any = lambda place, handle: handle,
) -> Statistics:  # fmt: skip
    data = make()
    data.keeps_missing = True
    grid = MemoryGrid({place: wrap(place, node.handle) for place, node in enumerate(at)})
    roster = new_roster(grid, data, CONFIG, lambda line: None)
    roster.gather(Gathering(wait_s=2))
    question = first_question(columns_of(data), bins, least, ranges, noise)

    def ask(now: Inquiry) -> Any:
        return ask_nodes(roster, data, now, 60, together, noise is None)

    return take_statistics(data, ask, question, noise, by_client=not together)


def here(make: Callable[[], Any], bins: int = 6, least: int = 1, ranges: Any = None, **kwargs: Any) -> Statistics:
    data = make()
    data.keeps_missing = True
    question = first_question(columns_of(data), bins, least, ranges, None)
    data.setup()
    return simulated(data, question, **kwargs)


@pytest.mark.parametrize("homes", [[[0, 1, 2]], [[0], [1], [2]], [[2, 0], [1]]])
@pytest.mark.parametrize("least", [1, 3, 10])
def test_over_nodes_is_in_one_process(tmp_path: Path, homes: Sequence[Sequence[int]], least: int) -> None:
    """Every figure of the file, to the bit; client 2 has 4 samples, fewer than 10."""
    root = write_clients(tmp_path)
    found = asked(lambda: arrays(root), nodes(lambda: arrays(root), homes), least=least).as_dict()
    assert found == here(lambda: arrays(root), least=least).as_dict()
    assert (found["clients"]["2"]["samples"] is None) == (least == 10)
    assert found["all"]["samples"] == (50 if least == 10 else 54)


def test_tables_with_missing_cells(tmp_path: Path) -> None:
    path = write_table(tmp_path)

    def make() -> Table:
        return table(path)

    assert asked(make, nodes(make, [[0, 2], [1]])).as_dict() == here(make).as_dict()


class Busy(MemoryGrid):
    """Nodes in this process, some of which answer at a time only."""

    def __init__(self, handlers: Any, clock: Clock) -> None:
        super().__init__(handlers)
        self.clock, self.busy_until = clock, dict[int, float]()

    def pull(self, message_ids: Collection[str]) -> Iterator[Reply]:
        yield from super().pull(
            [one for one in message_ids if self.busy_until.get(self._waiting[one][0], 0) <= self.clock.now]
        )


@pytest.mark.parametrize("together", [False, True])
def test_it_says_whose_statistics_are_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: bool) -> None:
    clock, path, said = Clock(monkeypatch), write_table(tmp_path), list[str]()
    data = table(path)
    data.keeps_missing = True
    at = nodes(lambda: table(path), [[0, 2], [1]], together=together)
    grid = Busy({place + 1: node.handle for place, node in enumerate(at)}, clock)
    roster = new_roster(grid, data, CONFIG, said.append)
    roster.gather(Gathering())
    begun, said[:] = clock.now, []
    grid.busy_until = {1: begun + 6, 2: begun + 100}
    ask_nodes(roster, data, first_question(columns_of(data), 6, 1, None, None), 3600, together)
    first, second = ("node 1", "node 2") if together else map(str, data.client_names[:2])
    of = ("", "") if together else ("clients ", "client ")
    assert said == [
        f"waiting for statistics of {of[0]}{first}, {second}: 5 s of at most 3600 s",
        f"waiting for statistics of {of[1]}{second}: 65 s of at most 3600 s",
    ]


def test_a_node_in_sums_tells_of_no_client(tmp_path: Path) -> None:
    root = write_clients(tmp_path)
    at = nodes(lambda: arrays(root), [[0, 1], [2]], together=True)
    found = asked(lambda: arrays(root), at, together=True).as_dict()
    assert found["clients"] == {}
    assert found == here(lambda: arrays(root), by_client=False).as_dict()
    refusal = at[0].handle(encode(ask_message(0, at[0].boot, Inquiry(6, 1, np.full((2, 2), np.nan)))))
    assert decode(refusal).fields["cause"] == "the node reports sums only"


def test_the_nodes_own_threshold_holds(tmp_path: Path) -> None:
    root = write_clients(tmp_path)
    (node,) = nodes(lambda: arrays(root), [[0, 1, 2]], least=10)
    answer = decode(node.handle(encode(ask_message(0, node.boot, Inquiry(6, 9, np.full((2, 2), np.nan))))))
    assert answer.fields["cause"] == "the node tells of no count below 10 samples; ask with --least 10"


def test_no_byte_tells_of_a_site_below_the_threshold(tmp_path: Path) -> None:
    """The answers for client 2 are the same, whatever its 4 samples are."""
    answers = []
    for shade in (3, 200):
        root = write_clients(tmp_path / str(shade))
        x, y = np.full((4, 4, 4, 2), shade, np.uint8), np.full(4, shade % 3)
        np.savez(root / "client_2" / "data.npz", x_train=x, y_train=y, x_test=x[:0], y_test=y[:0])
        (node,) = nodes(partial(arrays, root), [[2]], least=5)
        node.boot = "ab"
        hello = Message("hello", {"protocol": PROTOCOL, "version": _version(), "settings": node.settings, "config": ""})
        blobs = [node.handle(encode(hello))]
        both = (np.full((2, 2), np.nan), np.array([[0.0, 1.0]] * 2))
        blobs += [node.handle(encode(ask_message(2, "ab", Inquiry(6, 5, ranges)))) for ranges in both]
        assert decode(blobs[2]).word == "answer"
        answers.append(blobs)
    assert answers[0] == answers[1]


def _version() -> str:
    from lit_fed import __version__

    return __version__


def test_a_second_histogram_is_refused(tmp_path: Path) -> None:
    """Its difference to the first would hold the values between two edges, were they a single sample's."""
    root = write_clients(tmp_path)
    at = nodes(lambda: arrays(root), [[0, 1, 2]], least=3)
    first = asked(lambda: arrays(root), at, least=3, ranges={"*": [0, 1]}).as_dict()
    assert asked(lambda: arrays(root), at, least=3, ranges={"*": [0, 1]}).as_dict() == first
    with pytest.raises(ConfigError, match="no statistics of 0 within 60 s; see its node's log"):
        asked(lambda: arrays(root), at, least=3, ranges={"*": [0, 0.99]})


def test_noise_is_added_on_the_node_once(tmp_path: Path) -> None:
    """The same question gets the same answer, as another draw could be averaged; a restarted node draws anew."""
    pytest.importorskip("dp_accounting")
    root, noise, ranges = write_clients(tmp_path), Noise(2.0, 1e-5), {"*": [0, 1]}
    answers = []
    for _ in range(2):
        at = nodes(lambda: arrays(root), [[0, 1], [2]], noise=noise)
        answers += [asked(lambda: arrays(root), at, ranges=ranges, noise=noise).as_dict() for _ in range(2)]
    assert answers[0] == answers[1] != answers[2] == answers[3]
    assert answers[0]["privacy"]["noise_from"] == "each site"
    assert all(answers[0]["clients"][name]["samples"] != size for name, size in (("0", 30), ("1", 20), ("2", 4)))
    hello = Message("hello", {"protocol": PROTOCOL, "version": _version(), "settings": at[0].settings, "config": ""})
    assert decode(at[0].handle(encode(hello))).fields["clients"]["0"]["samples"] == 0
    refusal = decode(at[0].handle(encode(ask_message(0, at[0].boot, Inquiry(6, 1, np.full((2, 2), np.nan))))))
    assert "the ranges of noisy statistics must be given" in refusal.fields["cause"]


def test_nodes_for_training_and_for_statistics_refuse_each_others_servers(tmp_path: Path) -> None:
    root = write_clients(tmp_path)
    with pytest.raises(ConfigError) as error:
        asked(lambda: arrays(root), nodes_of(small(), tmp_path, [[0, 1]]))  # type: ignore[arg-type]
    assert '--statistics is not set on the node and "asked for" on the server' in str(error.value)
    (node,) = nodes(lambda: arrays(root), [[0]])
    train = encode(Message("train", {"client": 0, "round": 0}))
    assert "the node answers --statistics alone, not 'train'" in decode(node.handle(train)).fields["cause"]
    hello = Message("hello", {"protocol": PROTOCOL, "version": _version(), "settings": {}, "config": ""})
    assert (
        '--statistics is "asked for" on the node and not set on the server'
        in decode(node.handle(encode(hello))).fields["cause"]
    )


def _answer(**changes: Any) -> Message:
    site = empty(2, 3, Inquiry(6, 1, np.array([[0.0, 1.0]] * 2)))
    tensors = dict(pack(site).tensors["site"])
    tensors |= {name: value for name, value in changes.items() if isinstance(value, torch.Tensor)}
    for name in [name for name, value in changes.items() if value is None]:
        del tensors[name]
    return Message("answer", {"clients": changes.get("clients", 0)}, {"site": tensors})


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"count": None}, "'count' of the statistics is malformed"),
        ({"count": torch.zeros(3, dtype=torch.float64)}, "'count' of the statistics is malformed"),
        ({"count": torch.zeros(2)}, "'count' of the statistics is malformed"),
        ({"cells": torch.zeros(2, 9, dtype=torch.float64)}, "'cells' of the statistics is malformed"),
        ({"total": torch.zeros(2, 65, dtype=torch.float64)}, "'total' of the statistics is malformed"),
        ({"total": torch.zeros(1, 1, dtype=torch.float64)}, "'total' of the statistics is malformed"),
        ({"squares": torch.full((2, 1), torch.nan, dtype=torch.float64)}, "'squares' of the statistics is not finite"),
        ({"samples": torch.tensor([torch.inf], dtype=torch.float64)}, "a count of the statistics is not a number"),
        ({"classes": torch.full((3,), 1e300, dtype=torch.float64)}, "a count of the statistics is not a number"),
        ({"count": torch.tensor([1.5, 0], dtype=torch.float64)}, "a count of the statistics is not a number"),
        ({"missing": torch.tensor([-1.0, 0], dtype=torch.float64)}, "a count of the statistics is not a number"),
        ({"total": torch.full((2, 1), 1e200, dtype=torch.float64)}, "'total' of the statistics is not finite"),
        ({"unit": torch.zeros(2, dtype=torch.float64)}, "a unit of the statistics is out of its range"),
        ({"clients": 2}, "the statistics are of other clients"),
    ],
)
def test_a_nodes_answer_is_untrusted(changes: Any, line: str) -> None:
    question = Inquiry(6, 1, np.array([[0.0, 1.0]] * 2))
    unpack(_answer(), 2, 3, question, 0)
    with pytest.raises(WireError, match=line):
        unpack(_answer(**changes), 2, 3, question, 0)


@pytest.mark.parametrize(
    "fields", [{"bins": 0}, {"bins": 1001}, {"bins": "6"}, {"least": 0}, {"least": 1.5}, {"ranges": 3}]
)
def test_a_servers_question_is_untrusted(fields: Any) -> None:
    plain = ask_message(0, "ab", Inquiry(6, 1, np.array([[0.0, 1.0]] * 2)))
    ranges = torch.zeros(3, 2, dtype=torch.float64) if fields.pop("ranges", None) else plain.tensors["ranges"]["ranges"]
    with pytest.raises(WireError):
        read_question(Message("statistics", {**plain.fields, **fields}, {"ranges": {"ranges": ranges}}), 2, 1)


def test_sums_cross_exactly(tmp_path: Path) -> None:
    root = write_clients(tmp_path)
    data = arrays(root)
    data.setup()
    question = Inquiry(6, 1, np.array([[0.0, 1.0]] * 2))
    site = withheld(survey(data, [0, 1], question), 1)
    found = unpack(decode(encode(pack(site))), 2, 3, question, 2)
    assert (found.total, found.squares) == (site.total, site.squares)
    assert found.total[0].denominator % 2 == 1 < found.total[0].denominator  # of 255: no float has it


@pytest.mark.long
def test_by_the_command_line_over_sockets(tmp_path: Path) -> None:
    """Two nodes and a server by gRPC; the file equals that of a simulation."""
    write_clients(tmp_path / "clients")
    init = {"num_clients": 3, "stored_shape": [2, 4, 4], "num_classes": 3, "root": str(tmp_path / "clients")}
    (tmp_path / "data.yaml").write_text(yaml.safe_dump({"data": {"class_path": "ClientArrays", "init_args": init}}))
    address, asked_for = free_address(), ("--least", "3", "--ranges", "{'*': [0, 1]}", "--picture")
    with ExitStack() as stack:
        for clients in ("[0, 2]", "[1]"):
            words = ("--client", clients, "--server", address, "--state_dir", f"node_{clients[1]}", "--statistics", "1")
            process = start_cli("node", "-c", "data.yaml", *words, cwd=tmp_path)
            stack.callback(process.wait, 30)
            stack.callback(process.terminate)
        written = ("there.png", "--output", "there.json", "--server", address)
        there = run_cli("statistics", "-c", "data.yaml", *asked_for, *written, cwd=tmp_path)
    assert there.returncode == 0, there.stderr
    here = run_cli("statistics", "-c", "data.yaml", *asked_for, "here.png", "--output", "here.json", cwd=tmp_path)
    assert (tmp_path / "there.json").read_text() == (tmp_path / "here.json").read_text()
    assert here.stdout.replace("here", "there") == there.stdout[there.stdout.index("54 training samples") :]
    assert (tmp_path / "there.png").read_bytes() == (tmp_path / "here.png").read_bytes()


def test_bad_words(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = ["statistics", "--data", "Digits"]
    Path("there.json").write_text("")
    for words, line in (
        (["statistics"], "data"),
        ([*data, "--output", "s.csv"], "--output is 's.csv'; name a file that ends in .json"),
        ([*data, "--output", "there.json"], "there.json exists; name another file with --output"),
        ([*data, "--picture", "s.gif"], "--picture is 's.gif'; name a file that ends in .png or .svg"),
        ([*data, "--bins", "0"], "--bins is 0; it must be"),
        ([*data, "--bins", "many"], "bins"),
        ([*data, "--least", "0"], "--least is 0; it must be at least 1"),
        ([*data, "--report", "all"], "report"),
        ([*data, "--ranges", "[1]"], "ranges"),
        (
            [*data, "--ranges", "{pixel: [0, 1]}"],
            "--ranges names 'pixel', which is not a column; the data have channel 0",
        ),
        ([*data, "--ranges", "{channel 0: 1}"], "--ranges.channel 0 is 1; give the least and the largest value"),
        ([*data, "--answer_s", "0"], "--answer_s is 0.0; it must be above 0"),
        ([*data, "--server", "nowhere"], "--server is 'nowhere'; it must be a host and a port"),
        ([*data, "--data.normalize", "none.json"], "data.normalize none.json cannot be read"),
        (["node", "-c", "x.yaml", "--statistics", "5"], "config file x.yaml does not exist"),
    ):
        assert line in error_of(words, capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there.json"]
