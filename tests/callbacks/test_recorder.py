"""The files of a run: one row a round, whatever a process that was killed left behind."""

from __future__ import annotations

import csv
import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lit_fed.callbacks import Callback, Recorder, RoundRecord
from lit_fed.callbacks.recorder import _partition
from lit_fed.engine.evaluation.protocols import ClientRow
from lit_fed.methods import FedAvg
from lit_fed.participation import UniformParticipation
from tests.support import LeastSquares, Points, fit, rows, trainer


def text(folder: Path, name: str) -> list[str]:
    return (folder / name).read_text().splitlines()


def test_one_row_a_round(tmp_path: Path) -> None:
    made = fit(tmp_path, max_rounds=4)
    table = rows(made.log_dir / "metrics.csv")
    assert [row["round"] for row in table] == ["0", "1", "2", "3"]
    # The loss after the first round is 2.7265625, see test_fedavg.py: written so that it reads back to the last bit.
    assert float(table[0]["global/loss"]) == 2.7265625
    assert float(table[-1]["time/round_s"]) == made.metrics["time/round_s"]
    assert list(table[0]) == ["round", *made.metrics]


def test_a_metric_that_appears_late_gets_a_column(tmp_path: Path) -> None:
    made = fit(tmp_path, max_rounds=5, evaluate_every=2)
    table = rows(made.log_dir / "metrics.csv")
    assert [row["round"] for row in table] == ["0", "1", "2", "3", "4"]
    assert [bool(row["global/loss"]) for row in table] == [False, True, False, True, True]
    assert all(row["train/loss"] for row in table)
    with open(made.log_dir / "metrics.csv", newline="") as file:
        assert len({len(line) for line in csv.reader(file)}) == 1


def test_clients_in_long_form(tmp_path: Path) -> None:
    made = fit(tmp_path, max_rounds=2)
    assert text(made.log_dir, "clients.csv")[0] == "round,client_id,stage,metric,value"
    table = rows(made.log_dir / "clients.csv")
    keys = [(row["round"], row["client_id"], row["stage"], row["metric"]) for row in table]
    logged = ("train/loss", "time_s", "downlink_bytes", "uplink_bytes")
    expected = {(r, c, "train", metric) for r in "01" for c in "01" for metric in logged}
    assert set(keys) == expected | {(r, c, "test", "loss") for r in "01" for c in "01"}
    assert len(keys) == len(set(keys))
    values = dict(zip(keys, [row["value"] for row in table], strict=True))
    # Before round 0 the losses are ½·2² and ½·4²; two float32 are 8 bytes.
    assert [float(values["0", client, "train", "train/loss"]) for client in "01"] == [2.0, 8.0]
    assert {values["1", client, "train", "uplink_bytes"] for client in "01"} == {"8"}


def test_only_the_cohort_trains(tmp_path: Path) -> None:
    made = fit(tmp_path, data=Points(8), max_rounds=6, participation=UniformParticipation(count=3))
    table = [row for row in rows(made.log_dir / "clients.csv") if row["metric"] == "uplink_bytes"]
    for round_idx in range(6):
        found = [int(row["client_id"]) for row in table if row["round"] == str(round_idx)]
        assert found == sorted(made.run.federation.participation.select(round_idx))


def test_partition_record(tmp_path: Path) -> None:
    made = fit(tmp_path, data=Points(3), max_rounds=1)
    record = json.loads((made.log_dir / "partition.json").read_text())
    # Samples 0 | 1 2 3 | 4 with labels 2 | 4 4 4 | 2.
    assert record["clients"] == {
        "0": {"indices": [0], "histogram": [0, 0, 1, 0, 0]},
        "1": {"indices": [1, 2, 3], "histogram": [0, 0, 0, 0, 3]},
        "2": {"indices": [4], "histogram": [0, 0, 1, 0, 0]},
    }
    digest = hashlib.sha256()
    none, empty = [], [0, 0, 0, 0]  # nothing is held out for validation, calibration or the public set
    for array in ([0, 1, 2, 3, 4], [0, 1, 4, 5], none, empty, none, empty, none):
        digest.update(np.int64(len(array)).tobytes() + np.array(array, dtype=np.int64).tobytes())
    assert record["sha256"] == digest.hexdigest()
    values = hashlib.sha256()  # of all labels, and the shapes of the inputs, whose values are told by sums
    for _ in range(2):
        values.update(b"(5,) i" + np.array([2, 4, 4, 4, 2], dtype=np.int64).tobytes())
    values.update(b"(5, 2) f" * 2)
    assert record["data"]["sha256"] == values.hexdigest()
    assert len(record["data"]["sums"]) == len(record["data"]["sizes"]) == 10


def test_partition_of_some_clients_only_is_json_too() -> None:
    # A node that holds clients 1 and 2 of 3: samples 1 2 3 | 4 with labels 4 4 4 | 2.
    data = Points(3)
    data.setup("fit", clients=[1, 2])
    assert json.loads("".join(_partition(data))) == {
        "sha256": data.record.sha256,
        "data": {
            name: list(value) if name != "sha256" else value for name, value in vars(data.record.contents).items()
        },
        "clients": {
            "1": {"indices": [1, 2, 3], "histogram": [0, 0, 0, 0, 3]},
            "2": {"indices": [4], "histogram": [0, 0, 1, 0, 0]},
        },
    }


def test_configuration_is_written_as_it_is(tmp_path: Path) -> None:
    made = trainer(tmp_path, max_rounds=1)
    config = "trainer:\n  max_rounds: 1\n"
    made.describe(config)
    made.fit(LeastSquares(), Points(), FedAvg())
    assert (made.log_dir / "config.yaml").read_text() == config


@pytest.mark.parametrize("name", ["metrics.csv", "clients.csv"])
def test_rounds_that_run_again_and_a_line_cut_short_are_dropped(tmp_path: Path, name: str) -> None:
    whole = fit(tmp_path / "whole", max_rounds=4)
    half = fit(tmp_path, max_rounds=2)
    path = half.log_dir / name
    complete = path.read_text().splitlines(keepends=True)
    again = complete[-1].replace("1,", "2,", 1)  # a round that was killed before its checkpoint
    for tail in (again, again + again[: len(again) // 2], again.rstrip("\n"), "2", "2," + "\0" * 40):
        path.write_text("".join(complete) + tail)
        resumed = fit(tmp_path, max_rounds=3, ckpt_path="last")
        assert resumed.log_dir == half.log_dir
        assert resumed.run.start_round == 2
        for round_idx in "012":
            found = [row for row in rows(path) if row["round"] == round_idx]
            expected = [row for row in rows(whole.log_dir / name) if row["round"] == round_idx]
            assert len(found) == len(expected) > 0
        assert [row["round"] for row in rows(path) if row["round"] not in "012"] == []
        # back to two rounds for the next tail
        fit(tmp_path / "again", max_rounds=2)
        (half.log_dir / "checkpoints" / "last.ckpt").write_bytes(
            (tmp_path / "again" / "lightning_logs" / "version_0" / "checkpoints" / "last.ckpt").read_bytes()
        )


def test_resumed_before_a_column_appeared(tmp_path: Path) -> None:
    # Two rounds without an evaluation, then a resume in which the third round brings new columns.
    fit(tmp_path, max_rounds=3, evaluate_every=3, callbacks=[_Stop(2)])
    resumed = fit(tmp_path, max_rounds=3, evaluate_every=3, ckpt_path="last")
    assert resumed.run.start_round == 2
    table = rows(resumed.log_dir / "metrics.csv")
    assert [(row["round"], bool(row["global/loss"]), bool(row["train/loss"])) for row in table] == [
        ("0", False, True),
        ("1", False, True),
        ("2", True, True),
    ]


class _Stop(Callback):
    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_round_end(self, run: Any, record: RoundRecord) -> None:
        run.should_stop = record.round_idx + 1 == self.rounds


def test_names_and_values_with_commas_and_quotes(tmp_path: Path) -> None:
    made: Any = SimpleNamespace(fabric=SimpleNamespace(is_global_zero=True), log_dir=tmp_path)
    recorder = Recorder()
    recorder._columns = ["round"]
    odd = 'a,"b" c'
    recorder.on_round_end(made, RoundRecord(0, {odd: 1.5}, [ClientRow(3, "test", odd, float("nan"))], []))
    recorder.on_round_end(made, RoundRecord(1, {"x": 0.1, odd: float("inf")}, [], []))
    assert rows(tmp_path / "metrics.csv") == [
        {"round": "0", odd: "1.5", "x": ""},
        {"round": "1", odd: "inf", "x": "0.1"},
    ]
    assert text(tmp_path, "clients.csv") == ['0,3,test,"a,""b"" c",nan']


def test_clients_of_a_name_have_it_last(tmp_path: Path) -> None:
    made: Any = SimpleNamespace(fabric=SimpleNamespace(is_global_zero=True), log_dir=tmp_path)
    recorder = Recorder()
    recorder._columns, recorder._names = ["round"], ["north", 'the "old", south']
    lines = [ClientRow(1, "train", "loss", 0.5), ClientRow(0, "train", "loss", 2)]
    recorder.on_round_end(made, RoundRecord(7, {}, lines, []))
    assert text(tmp_path, "clients.csv") == ['7,1,train,loss,0.5,"the ""old"", south"', "7,0,train,loss,2,north"]


def test_no_half_written_file_is_left(tmp_path: Path) -> None:
    made = fit(tmp_path, max_rounds=2)
    assert {path.name for path in made.log_dir.iterdir()} == {
        ".lock",
        "checkpoints",
        "clients.csv",
        "metrics.csv",
        "partition.json",
    }
