"""What a run will send is foreseen to the byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lit_fed.client import ClientContext
from lit_fed.command.cli import main
from lit_fed.command.cost import foresee
from lit_fed.data import Digits
from lit_fed.methods import UWA, FedAvg, UWAServer
from lit_fed.payload import CastCodec, Payload
from tests.methods.run_methods import CONFIGS, run_method
from tests.support import LeastSquares, Points, rows, trainer
from tests.test_families import Exchange, Mixing


def foreseen(folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    main(["cost", "-c", str(folder / "config.yaml")])
    return capsys.readouterr().out


@pytest.mark.parametrize("method", ["fedfrozen", "scaffold", "fedper", "fd_avg", "fedmd", "feddf"])
def test_a_runs_bytes_are_those_foreseen(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_method(CONFIGS / "method" / f"{method}.yaml", tmp_path, 4)
    lines = foreseen(run, capsys).splitlines()
    table = {}
    for line in lines[2:-1]:
        if not line[0].isdigit():
            continue
        span, *numbers = line.split()
        first, _, last = span.partition("–")
        for round_idx in range(int(first), int(last or first) + 1):
            table[round_idx] = [int(number.replace(",", "")) for number in numbers[-2:]]
    measured = [
        [float(row["comm/downlink_bytes"]), float(row["comm/uplink_bytes"])] for row in rows(run / "metrics.csv")
    ]
    assert [table[round_idx] for round_idx in range(4)] == measured


def test_codecs_and_cohorts_count() -> None:
    # Two float32 from the model of two weights: 8 bytes down, 4 up in bfloat16, to and from two clients.
    made = trainer(Path(), max_rounds=3, uplink_codec=CastCodec("bfloat16"))
    cost = foresee(made, LeastSquares(), Points(), FedAvg())
    assert [(one.downlink, one.uplink) for one in cost.rounds] == [(16, 8)] * 3
    assert (cost.total, cost.ratio, cost.frozen) == (72, 1.0, 0)
    assert cost.parameters == 2


def test_methods_that_send_predictions_say_their_size() -> None:
    class Announced(Exchange):
        def example_payload(self, ctx: ClientContext) -> Payload:
            return {"predictions": torch.empty(100, 10, device="meta")}

    cost = foresee(trainer(Path(), max_rounds=2), Announced(), Digits(num_clients=4, public_size=100), Mixing())
    assert [one.uplink for one in cost.rounds] == [4 * 100 * 10 * 4] * 2


def test_densities_are_foreseen_for_all_classes() -> None:
    # 100 public samples × 10 classes, and mean and variance of 10 logits for each of 10 classes: 4·(1000 + 200) bytes.
    data = Digits(num_clients=4, public_size=100, calibration_fraction=0.2)
    cost = foresee(trainer(Path(), max_rounds=2), UWA(network="mlp", input_shape=(1, 8, 8)), data, UWAServer())
    assert [(one.down, one.up) for one in cost.rounds] == [(0, 4800), (4000, 4800)]


def test_pretrained_weights_are_not_fetched(capsys: pytest.CaptureFixture[str]) -> None:
    main(["cost", "-c", str(CONFIGS / "experiment" / "suwa_cifar100.yaml")])
    out, err = capsys.readouterr()
    assert err == ""
    assert f"{5000 * 100 * 4:,}" in out  # down, a round
