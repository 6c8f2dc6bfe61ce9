"""What a node tells, keeps to itself, says while it works, and refuses of a server."""

from __future__ import annotations

import errno
import re
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed.engine.storage.files import cannot_write
from lit_fed.errors import CheckpointError, ClientFailure, ClientTimeout, ConfigError, NonFiniteUpdate, outline
from lit_fed.federation.messages.wire import Message, decode, encode
from lit_fed.federation.node.log import NodeLog
from lit_fed.federation.node.node import Node
from lit_fed.methods import FedAvg, Scaffold
from lit_fed.protocols import ClientTest, GlobalTest
from tests.federation.support import deploy, nodes_of, small
from tests.support import Points

SECRET = "MUELLER_HANS"
RUN = "0" * 16


def told(node: Node, word: Any = "train", payload: Any = None, **changes: Any) -> Message:
    """What a node answers to work for its client 0 in round 0."""
    fields: dict[str, Any] = {
        "client": 0,
        "round": 0,
        "run": RUN,
        "boot": node.boot,
        "version": None,
        "drop": [],
        "frozen": {},
    }
    tensors = {"payload": {"network.weight": torch.zeros(1, 2)} if payload is None else payload}
    return decode(node.handle(encode(Message(word, fields | {"together": [0]} | changes, tensors))))


@pytest.mark.parametrize("word", ["train", "ask"])
def test_no_tensor_of_a_message_stays_in_memory_after_the_answer(tmp_path: Path, word: Any) -> None:
    """A tensor that is a view of the message's bytes refers to them."""
    (node,) = nodes_of(small(), tmp_path, [[0, 1]])
    fields: dict[str, Any] = {
        "client": 0, "round": 0, "run": RUN, "boot": node.boot, "version": None, "drop": [], "frozen": {},
        "together": [0],
    }  # fmt: skip
    fields |= {"protocol": "clients", "subset": "test"} if word == "ask" else {}
    blob = encode(Message(word, fields, {"payload": {"network.weight": torch.zeros(1, 2)}}))
    with node.at_work():
        assert decode(node.handle(blob)).word != "failure"
        assert sys.getrefcount(blob) <= 2  # this function's and the call's


# ---------------------------------------------------------------------- what it tells


class Quoting(FedAvg):
    """Its clients fail with an error that quotes their data."""

    error: Callable[[], BaseException]

    def objective(self, client: Any, batch: Any) -> Any:
        raise type(self).error()


@pytest.mark.parametrize("report", ["clients", "aggregate"])
@pytest.mark.parametrize(
    ("error", "name"),
    [
        (lambda: RuntimeError(f"cannot read /data/{SECRET}: row [1.0, 0.0] label 2"), "RuntimeError"),
        (lambda: OSError(2, "no such file", f"/data/{SECRET}.png"), "FileNotFoundError"),
        (lambda: ConfigError(f"/data/{SECRET}.csv, line 7: [1.0, 0.0] is no number"), "ConfigError"),
        (lambda: CheckpointError(f"cannot write /home/{SECRET}/0.r1.states: no space left"), "CheckpointError"),
        (lambda: SystemExit(f"row of {SECRET}"), "SystemExit"),
        (lambda: ClientFailure(0, 0, f"row of {SECRET}"), "ClientFailure"),
        (lambda: KeyError(SECRET), "KeyError"),
        (lambda: MemoryError(SECRET), "MemoryError"),
    ],
)
def test_an_error_that_quotes_data_is_told_by_its_type_and_place(
    tmp_path: Path, report: Any, error: Callable[[], BaseException], name: str
) -> None:
    said: list[str] = []
    algorithm = type("Once", (Quoting,), {"error": staticmethod(error)})
    (node,) = nodes_of(small(algorithm=algorithm), tmp_path, [[0]], report=report, report_least=1, say=said.append)
    with node.at_work():
        blob = told(node)
        again = told(node)
    cause = str(blob.fields["cause"])
    assert cause.startswith(f"{name} in lit_fed/engine/")
    assert cause.endswith(" (error 1 in the log of its node)")
    assert again.fields["cause"] == cause
    assert SECRET.encode() not in encode(blob)
    shown = "there is not enough memory" if name == "MemoryError" else SECRET  # the text of the former is in the log
    assert any(shown in line for line in said)
    assert "error 1: client 0 failed in round 0: " in (text := node.log.path.read_text())
    assert SECRET in text


def test_what_holds_no_data_is_told_as_it_is() -> None:
    """Names of metrics, a setting and a time; not where in a client's code it was."""
    assert outline(NonFiniteUpdate("train/loss is not finite; try a smaller learning rate")) == (
        "train/loss is not finite; try a smaller learning rate"
    )
    late = ClientTimeout("it did not finish within trainer.client_timeout of 2 s", f"/home/{SECRET}/task.py, line 3")
    assert outline(late) == "it did not finish within trainer.client_timeout of 2 s"
    assert outline(ValueError(SECRET)) == "ValueError in code outside of lit_fed"


def test_a_full_disk_is_told_to_the_server_without_the_path(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught, cannot_write(tmp_path / SECRET):
        raise RuntimeError(f"PyTorch cannot write {SECRET}") from OSError(errno.ENOSPC, SECRET, f"/data/{SECRET}")
    told = outline(caught.value)
    assert re.fullmatch(r"CheckpointError in lit_fed/engine/storage/files\.py, line \d+: No space left on device", told)
    assert outline(OSError(SECRET)) == "OSError in code outside of lit_fed"
    assert outline(OSError(10**6, SECRET)) == "OSError in code outside of lit_fed"  # the system has no such error
    one, other = ValueError(SECRET), ValueError(SECRET)
    one.__cause__, other.__cause__ = other, one
    assert outline(one) == "ValueError in code outside of lit_fed"


def test_data_that_cannot_be_read_are_not_quoted_to_the_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken(Points):
        def train_loader(self, client_id: int, generator: Any) -> Any:
            self.looked = getattr(self, "looked", 0) + (client_id == 1)
            if client_id == 1 and self.looked > 2:  # the first looks are at the start, on the node itself
                raise ConfigError(f"cannot read /data/{SECRET}: row [1.0, 0.0] label 2")
            return super().train_loader(client_id, generator)

    made = deploy(
        small(data=Broken, on_client_failure="skip"),
        tmp_path,
        [[0], [1]],
        own={"report": "aggregate", "report_least": 1},
    )
    assert made.metrics["participation/failed"] == 1
    assert SECRET not in capsys.readouterr().out
    assert not [path for path in made.log_dir.rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()]


def test_a_servers_words_do_not_colour_the_nodes_terminal(tmp_path: Path) -> None:
    said: list[str] = []
    (node,) = nodes_of(small(), tmp_path, [[0]], say=said.append)
    red = "\x1b[31mred\x07\r\n"
    hello = {"protocol": 2, "version": red, "settings": {red: red}, "config": ""}
    node.handle(encode(Message("hello", hello)))
    node.handle(encode(Message("hello", hello | {"version": "0.1.0"})))
    told(node, run=red)
    told(node, word="ask", protocol=red, subset=red)
    assert len(said) >= 4
    assert all(line.isprintable() and line.isascii() for line in said)


def test_a_log_holds_nothing_that_a_terminal_obeys_and_is_begun_anew(tmp_path: Path, monkeypatch: Any) -> None:
    log = NodeLog(tmp_path / "states")
    log.write("one\n\x1b[31mtwo\x07 \u202e müde")
    assert log.path.read_text(encoding="utf-8").endswith(" one\n  \\x1b[31mtwo\\x07 \\u202e müde\n")
    monkeypatch.setattr("lit_fed.federation.node.log._MOST_BYTES", 10)
    log.write("three")
    assert "one" in log.path.with_name("node.log.1").read_text(encoding="utf-8")
    assert log.path.read_text(encoding="utf-8").endswith(" three\n")


def test_what_a_node_writes_is_its_users_alone(tmp_path: Path) -> None:
    """States, what is kept of a run, and the log, in a folder that was there for everybody to read."""
    (tmp_path / "node_1" / "states").mkdir(parents=True, mode=0o755)
    failing = type(
        "Once", (Scaffold,), {"finish": lambda self, client: 1 / 0 if client.id == 3 else Scaffold.finish(self, client)}
    )
    make = small(data=lambda: Points(num_clients=4), algorithm=failing, on_client_failure="skip")
    deploy(make, tmp_path, [[0, 2], [1, 3]])
    folder = tmp_path / "node_1" / "states"
    written = list(folder.rglob("*"))
    names = {path.name for path in written}
    assert {"last.pt", "node.log"} <= names
    assert any(name.endswith(".states") for name in names)
    for path in [folder, *written]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


# ---------------------------------------------------------------------- what it says


def test_a_node_says_where_the_run_is_and_when_the_server_is_silent(tmp_path: Path, monkeypatch: Any) -> None:
    said: list[str] = []
    deploy(small(max_rounds=2), tmp_path, [[0, 1]], own={"say": said.append})
    assert said[:3] == ["registered with the server", "round 1 of 2", "round 2 of 2"]
    assert said[3].startswith("the run ended after round 2; its model is saved in ")
    (node,) = nodes_of(small(), tmp_path, [[0]], say=said.append)
    said.clear()
    node.idle()
    assert not said
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 125)
    node.idle()
    node.idle()
    assert said == ["waiting for the server, silent for 2 min; last message: nothing yet"]
    monkeypatch.setattr(time, "monotonic", lambda: now + 251)
    node.idle(connected=False)  # then its connection says so
    assert len(said) == 1
    node.idle()
    assert said[1] == "waiting for the server, silent for 4 min; last message: nothing yet"


# ---------------------------------------------------------------------- what it refuses


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol": "global", "subset": "test"}, "trainer.protocols on the node has no 'global' that asks clients"),
        ({"protocol": "personal", "subset": "test"}, "trainer.protocols on the node has no 'personal' that asks"),
        (
            {"protocol": "clients", "subset": "train"},
            "trainer.evaluate_on is 'test' on the node and 'train' on the server",
        ),
        ({"protocol": "clients", "subset": "val"}, "trainer.evaluate_on is 'test' on the node and 'val' on the server"),
    ],
)
def test_a_node_answers_no_question_of_another_configuration(tmp_path: Path, changes: Any, words: str) -> None:
    (node,) = nodes_of(small(protocols=[GlobalTest(), ClientTest()]), tmp_path, [[0]])
    with node.at_work():
        assert told(node, "ask", protocol="clients", subset="test").word == "answer"
        assert words in str(told(node, "ask", **changes).fields["cause"])


@pytest.mark.parametrize(("word", "changes"), [("train", {}), ("ask", {"protocol": "clients", "subset": "test"})])
def test_a_node_does_one_piece_of_work_so_often_and_no_more(tmp_path: Path, word: str, changes: Any) -> None:
    """A server that was killed asks again; one that asks for ever is refused, and other rounds are not."""
    (node,) = nodes_of(small(max_rounds=3), tmp_path, [[0]])
    with node.at_work():
        answers = [told(node, word, **changes) for _ in range(18)]
        assert [one.word for one in answers] == ["answer"] * 16 + ["failure"] * 2
        assert "more than 16 times in one round" in str(answers[-1].fields["cause"])
        assert told(node, word, round=1, **changes).word == "answer"
        assert told(node, word, run="1" * 16, **changes).word == "answer"
        assert told(node, word, **changes).word == "failure"


def test_ever_new_runs_reset_no_count(tmp_path: Path) -> None:
    """64 runs per process, each with its folder: a server that cycles through their ids is refused, not forgotten."""
    (node,) = nodes_of(small(), tmp_path, [[0]])
    with node.at_work():
        words = [told(node, run=f"{at:016x}").word for at in range(64)]
        assert words == ["answer"] * 64
        assert "began more than 64 runs; restart the node" in str(told(node, run="f" * 16).fields["cause"])
        assert [told(node, run="0" * 16).word for _ in range(16)] == ["answer"] * 15 + ["failure"]


@pytest.mark.parametrize("drop", [list(range(1001)), [-1], ["1"], [True], [2**40], [0.5]])
def test_a_node_drops_no_more_than_a_server_can_ask(tmp_path: Path, drop: list[Any]) -> None:
    (node,) = nodes_of(small(algorithm=Scaffold), tmp_path, [[0]])
    with node.at_work():
        assert "`$.drop" in str(told(node, drop=drop).fields["cause"])


def test_a_node_keeps_the_state_that_it_is_to_go_on_from(tmp_path: Path) -> None:
    (node,) = nodes_of(small(algorithm=Scaffold, max_rounds=3), tmp_path, [[0]])
    payload = {name: torch.zeros(1, 2) for name in ("network.weight", "control.network.weight")}
    with node.at_work():
        version = told(node, payload=payload).fields["version"]
        answer = told(node, payload=payload, round=1, version=version, drop=[0])
        assert "drops the state with which client 0 is to continue" in str(answer.fields["cause"])
        assert told(node, payload=payload, round=1, version=version).word == "answer"
        folder = tmp_path / "node_0" / "states" / RUN
        # The client's newest state, and the one that it continued from, stay, whatever is dropped.
        assert told(node, payload=payload, round=2, version=None, drop=[0, 1]).word == "answer"
        assert sorted(path.name for path in folder.iterdir()) == [f"0.r{at}.states" for at in range(3)]
        assert list((tmp_path / "node_0" / "states" / RUN).glob("0.r0.states"))
