"""A node's log: what was asked, what left, refusals and why; never a value of data, and no flood by a server."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed.engine.storage.chain import ChainReading
from lit_fed.errors import CheckpointError
from lit_fed.federation.audit import NAME, Audit
from lit_fed.federation.messages.wire import Message, encode
from lit_fed.federation.node.audited import AuditedNode
from lit_fed.methods import FedAvg
from lit_fed.privacy import SampleLevel
from tests.federation.support import nodes_of, small

RUN = "0123456789abcdef"


def audited(folder: Path, make: Any = None, **own: Any) -> tuple[AuditedNode, Any]:
    (folder / "audit").mkdir(parents=True)
    (node,) = nodes_of(make or small(), folder, [[0, 1]], **own)
    return AuditedNode(node, Audit(folder / "audit", None)), node


def work(node: Any, word: Any = "train", client: int = 0, round_idx: int = 0, **changes: Any) -> bytes:
    fields = {"client": client, "round": round_idx, "run": RUN, "boot": node.boot, "version": None, "drop": []}
    tensors = {"payload": {"network.weight": torch.zeros(1, 2)}}
    return encode(Message(word, {**fields, "frozen": {}, "together": [0, 1], **changes}, tensors))


def lines(folder: Path) -> list[dict[str, Any]]:
    reading = ChainReading(folder / "audit" / NAME)
    found = [{key: value for key, value in line.items() if key not in ("at", "previous")} for _, line in reading]
    assert reading.faults == []
    return found


def test_a_round_is_a_line_before_the_first_answer_and_one_of_what_left(tmp_path: Path) -> None:
    door, node = audited(tmp_path)
    sizes = {}
    with door.at_work():
        sizes["train"] = len(door.handle(work(node)))
        asked = {"event": "asked", "run": RUN, "round": 0, "asked": ["train"]}
        assert lines(tmp_path) == [asked]
        sizes["train"] += len(door.handle(work(node, client=1)))
        sizes["ask"] = len(door.handle(work(node, "ask", protocol="clients", subset="test")))
        assert lines(tmp_path) == [asked]
        door.idle()
        assert lines(tmp_path)[1:] == [
            {
                "event": "answered", "run": RUN, "round": 0, "asked": {"train": 2, "ask clients test": 1},
                "clients": [0, 1], "left": {"metrics + update": sizes["train"], "metrics": sizes["ask"]}, "refused": {},
                "epsilon": None,
            }
        ]  # fmt: skip
        door.handle(work(node, round_idx=1))
    assert [(line["event"], line["round"]) for line in lines(tmp_path)[2:]] == [("asked", 1), ("answered", 1)]


def test_a_node_that_reports_sums_says_that_sums_left(tmp_path: Path) -> None:
    door, node = audited(tmp_path, report="aggregate")
    with door.at_work():
        for client in (0, 1):
            door.handle(work(node, client=client))
    learning_rate, with_sums = "metrics + update", "metrics + sums of metrics + update"
    assert lines(tmp_path)[-1]["left"].keys() == {learning_rate, with_sums}


def test_nothing_leaves_that_the_log_cannot_name(tmp_path: Path) -> None:
    door, node = audited(tmp_path)
    shutil.rmtree(tmp_path / "audit")
    with pytest.raises(CheckpointError, match=r"cannot write .*audit\.jsonl: .*No such file"), door.at_work():
        door.handle(work(node))


SECRET = "MUELLER_HANS"


class Quoting(FedAvg):
    """Its clients fail with an error that quotes their data."""

    def objective(self, client: Any, batch: Any) -> Any:
        raise ValueError(f"no such patient: {SECRET}")


def test_a_refusal_has_its_cause_and_no_value_of_data(tmp_path: Path) -> None:
    door, node = audited(tmp_path, small(algorithm=Quoting))
    with door.at_work():
        door.handle(work(node))
        door.handle(work(node, client=7))
        door.handle(b"nothing")
    (line,) = lines(tmp_path)
    assert line["asked"] == {"train": 2, "unread message": 1}
    assert list(line["left"]) == ["refusal"]
    assert line["clients"] == []
    unread, failed, moved = sorted(line["refused"])
    assert failed.startswith("ValueError in lit_fed")
    assert moved == "client 7 is not on this node, which restarted in the meantime"
    assert unread == "7 bytes are not a message; run the same lit_fed on both ends"
    assert SECRET not in (tmp_path / "audit" / NAME).read_text()


def test_a_node_writes_the_budget_that_its_client_has_spent_most(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    level = SampleLevel(1.0, noise_multiplier=1.0, delta=0.01, key_file=str(tmp_path / "node.key"), withhold=False)
    private = small(algorithm=lambda: FedAvg(weighting="uniform"), privacy=level, on_client_failure="skip")
    door, node = audited(tmp_path, private, histogram=False)
    with door.at_work():
        answer = door.handle(work(node))
    header = json.loads(answer[8 : answer.index(b"}}") + 2])
    assert float(lines(tmp_path)[-1]["epsilon"]) == pytest.approx(header["fields"]["metrics"]["epsilon"], rel=1e-5)
    (door.node,) = nodes_of(small(), tmp_path / "other", [[0, 1]])  # as a node that stands begins another run
    with door.at_work():
        door.handle(work(door.node, run="0" * 16))
    assert lines(tmp_path)[-1]["run"] == "0" * 16
    assert lines(tmp_path)[-1]["epsilon"] is None


def test_a_server_that_asks_without_end_fills_no_log(tmp_path: Path) -> None:
    """Greetings, refusals with ever new causes, rounds that are none and unreadable bytes are counted in one line."""
    door, node = audited(tmp_path)
    hello = encode(Message("hello", {"protocol": 5, "version": "0.1.0", "settings": node.settings}))
    with door.at_work():
        for number in range(200):
            door.handle(hello)
            door.idle()
            door.handle(work(node, round_idx=number + 2))  # of two rounds
            door.handle(work(node, "ask", protocol=f"p{number}", subset="test"))
            door.handle(encode(Message("held", {"run": RUN})))
            door.handle(bytes(number))
    assert len(lines(tmp_path)) == 2
    assert (tmp_path / "audit" / NAME).stat().st_size < 8000
    last = lines(tmp_path)[-1]
    assert len(last["refused"]) <= 21
    assert sum(last["refused"].values()) > 300
    assert last["refused"]["others"] > 100


def test_rounds_of_a_secure_sum_that_are_none_begin_no_line(tmp_path: Path) -> None:
    """An offer of no client is answered for any round."""
    from lit_fed.privacy.secure_sum import SecureSum

    door, _ = audited(tmp_path, small(secure_sum=SecureSum(clip=1.0, threshold=3), on_client_failure="skip"))
    offer = {"run": RUN, "stage": "offer", "work": "train", "protocol": "", "subset": "", "clients": []}
    with door.at_work():
        for number in range(50):
            door.handle(encode(Message("secure", {**offer, "round": number})))
    (line,) = lines(tmp_path)
    assert line["asked"] == {"secure offer": 50}
    assert list(line["left"]) == ["keys, shares or consent"]
