"""The lines of a record, by hand, and what a kill, a resume, other executors and private runs make of them."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_fed.callbacks import Checkpoint
from lit_fed.codecs import CastCodec
from lit_fed.errors import CheckpointError
from lit_fed.methods import FedAvg
from lit_fed.participation import Asynchronous, PoissonParticipation, Stragglers, UniformParticipation
from lit_fed.privacy import ClientLevel, SecureSum
from tests.support import ROOT, LeastSquares, Points, Wanderer, Wandering, fit, run_cli

SHARED = ("round", "broadcast", "cohort", "updates", "server", "global", "metrics")


def lines_of(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "lightning_logs/version_0/record.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    """What the rounds' lines hold beside files and times, which the rows of clients have, too."""
    found = [{key: line[key] for key in SHARED if key in line} for line in lines_of(folder) if "server" in line]
    for line in found:
        line["metrics"] = {name: one for name, one in line["metrics"].items() if not name.startswith("time/")}
    return found


def tensor(*numbers: float, shape: str = "(1, 2)") -> str:
    """The SHA-256 of a float32 tensor."""
    return sha256(f"torch.float32 {shape}".encode() + np.array(numbers, np.float32).tobytes()).hexdigest()


def payload(**named: str) -> str:
    return sha256(
        json.dumps(sorted([name.replace("__", "."), one] for name, one in named.items())).encode()
    ).hexdigest()


def test_the_hashes_by_hand(tmp_path: Path) -> None:
    """Client 0 steps from (0, 0) to (1, 0), client 1 with three samples to (0, 2): their mean is (1/4, 3/2)."""
    fit(tmp_path, max_rounds=2, record=True)
    start, first, second, end = lines_of(tmp_path)
    assert first["broadcast"] == {"model": payload(network__weight=tensor(0, 0))}
    assert first["cohort"] == {"0": ["on_time", None], "1": ["on_time", None]}
    assert first["updates"] == {
        "0": {"bytes": 8, "weight": 1, "sha256": payload(network__weight=tensor(1, 0))},
        "1": {"bytes": 8, "weight": 3, "sha256": payload(network__weight=tensor(0, 2))},
    }
    assert first["server"] == {"model.network.weight": tensor(0.25, 1.5)}
    assert first["global"] == second["broadcast"] == {"model": payload(network__weight=tensor(0.25, 1.5))}
    assert first["metrics"]["participation/count"] == 2
    assert (start["round"], end["round"]) == (0, 2)
    assert start["facts"]["machine"]["threads"] == 1
    run = tmp_path / "lightning_logs/version_0"
    partition = json.loads((run / "partition.json").read_text(encoding="utf-8"))
    assert start["facts"]["data"]["partition"] == partition["sha256"]
    assert end["files"] == {"checkpoints/last.ckpt": sha256((run / "checkpoints/last.ckpt").read_bytes()).hexdigest()}


def test_an_update_is_recorded_as_the_codec_leaves_it(tmp_path: Path) -> None:
    """1/3 in float16 is 0x3555 = 0.333251953125; a step of 1/6 of the first gradient -2 ends there."""
    fit(tmp_path, LeastSquares(lr=1 / 6), max_rounds=1, record=True, uplink_codec=CastCodec("float16"))
    update = lines_of(tmp_path)[1]["updates"]["0"]
    assert update == {"bytes": 4, "weight": 1, "sha256": payload(network__weight=tensor(0.333251953125, 0))}


HARD = {
    "stragglers": lambda: UniformParticipation(
        6,
        dropout_before=0.2,
        stragglers=Stragglers(deadline=2.5, speed_sigma=0.0, seconds_per_sample=1.0, late="next_round"),
    ),
    "asynchronous": lambda: Asynchronous(concurrency=3, buffer=2),
}


@pytest.mark.parametrize("executor", ["sequential", "vectorized"])
@pytest.mark.parametrize("who", HARD)
def test_resumed_is_uninterrupted(tmp_path: Path, who: str, executor: str) -> None:
    """Clients drop out, arrive late, keep state and start from several versions."""
    for folder, steps in (("whole", (5,)), ("parts", (1, 3, 5))):
        for rounds in steps:
            torch.manual_seed(0)
            parts = (Wanderer(), Points(8, sizes=(2, 3)), Wandering())
            settings = {"participation": HARD[who](), "executor": executor, "buffers": "local", "record": True}
            fit(tmp_path / folder, *parts, max_rounds=rounds, ckpt_path="last", **settings)
    whole = rounds_of(tmp_path / "whole")
    assert [line["round"] for line in whole] == list(range(5))
    assert whole == rounds_of(tmp_path / "parts")
    fates = {tuple(fate) for line in whole for fate in line["cohort"].values()}
    assert ("late", None) in fates if who == "stragglers" else any(version is not None for _, version in fates)


def test_a_line_that_a_kill_tore_and_rounds_without_a_checkpoint_are_cut(tmp_path: Path) -> None:
    fit(tmp_path, max_rounds=2, record=True)
    file = tmp_path / "lightning_logs/version_0/record.jsonl"
    whole = file.read_bytes()
    lines = whole.splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:-1]) + lines[-2].replace(b'"round":1', b'"round":2') + lines[-1][:20])
    with pytest.raises(CheckpointError, match="is not the record of the rounds before round 2"):
        fit(tmp_path, max_rounds=3, record=True, ckpt_path="last")  # its line 4 does not follow line 3
    assert file.read_bytes().endswith(lines[-1][:20]), "it was rewritten"
    file.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    fit(tmp_path, max_rounds=3, record=True, ckpt_path="last")
    assert file.read_bytes().startswith(b"".join(lines[:-1]))
    assert [line["round"] for line in lines_of(tmp_path)] == [0, 0, 1, 2, 3]


def test_a_resume_from_an_earlier_checkpoint_takes_its_rounds_along(tmp_path: Path) -> None:
    fit(tmp_path, max_rounds=3, record=True, callbacks=[Checkpoint(keep_last=3)])
    folder = tmp_path / "lightning_logs"
    fit(tmp_path, max_rounds=3, record=True, ckpt_path=str(folder / "version_0/checkpoints/round=0.ckpt"))
    old, new = ((folder / name / "record.jsonl").read_bytes().splitlines() for name in ("version_0", "version_1"))
    assert old[:2] == new[:2]
    assert len(new) == len(old)


def test_a_record_of_other_rounds_is_refused_and_left(tmp_path: Path) -> None:
    fit(tmp_path, max_rounds=2, record=True)
    fit(tmp_path, max_rounds=3, ckpt_path="last")  # without a line
    file = tmp_path / "lightning_logs/version_0/record.jsonl"
    before = file.read_bytes()
    with pytest.raises(CheckpointError, match="is not the record of the rounds before round 3"):
        fit(tmp_path, max_rounds=4, record=True, ckpt_path="last")
    assert file.read_bytes() == before


def test_a_private_record_has_no_client_and_no_fingerprint_without_the_key(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    privacy = ClientLevel(clip_norm=1.0, noise_multiplier=1.0, key_file=str(tmp_path / "key"))
    uniform, few = FedAvg(weighting="uniform"), PoissonParticipation(0.5)
    made = fit(
        tmp_path,
        data=Points(6),
        algorithm=uniform,
        privacy=privacy,
        participation=few,
        record=True,
        on_client_failure="skip",
    )
    start, *rounds, _ = lines_of(tmp_path)
    fields = {"round", "broadcast", "server", "global", "metrics", "rows", "files", "previous"}
    assert [line.keys() for line in rounds] == [fields] * 2
    assert all("privacy/epsilon" in line["metrics"] for line in rounds)
    assert {line["rows"] for line in rounds} == {sha256(b"").hexdigest()}
    record = made.run.federation.data.record
    text = (made.log_dir / "record.jsonl").read_text(encoding="utf-8")
    assert start["facts"]["data"].keys() == {"keyed"}
    assert record.sha256 not in text
    assert record.contents.sha256 not in text


def test_of_a_sum_the_clients_are_recorded_and_no_single_update(tmp_path: Path) -> None:
    fit(tmp_path, data=Points(4), secure_sum=SecureSum(3, 8.0), record=True)
    first = lines_of(tmp_path)[1]
    assert first["updates"] == {client: {"summed": 1} for client in "0123"}


def test_without_checkpoints_there_is_a_record_all_the_same(tmp_path: Path) -> None:
    made = fit(tmp_path, record=True, enable_checkpointing=False)
    made.max_rounds = 3
    made.fit(*made._parts)
    assert [line["round"] for line in lines_of(tmp_path)] == [0, 0, 1, 2, 3]


def test_a_trial_writes_none(tmp_path: Path) -> None:
    made = fit(tmp_path, record=True, fast_dev_run=True)
    assert not [one for one in made.callbacks if type(one).__name__ == "Record"]


@pytest.mark.long
def test_killed_before_a_checkpoint_and_resumed(tmp_path: Path) -> None:
    """The line of the last round is there, and its checkpoint is not."""
    killed = "[{class_path: tests.support.KilledBeforeTheCheckpoint, init_args: {round_idx: 1}}]"
    words = ["fit", "-c", ROOT / "configs/quickstart.yaml", "--trainer.record", "true", "--trainer.max_rounds", "3"]
    for folder, more in (("whole", ()), ("parts", ("--trainer.callbacks", killed)), ("parts", ("--ckpt_path", "last"))):
        (tmp_path / folder).mkdir(exist_ok=True)
        done = run_cli(*words, *more, cwd=tmp_path / folder)
        assert (done.returncode == 0) == ("--trainer.callbacks" not in more), done.stderr
    assert rounds_of(tmp_path / "whole") == rounds_of(tmp_path / "parts")
