"""What cannot be made from settings, and what is made that waits for the number of rounds."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch.cli import LRSchedulerCallable

from lit_fed import load_network
from lit_fed.command.cli import main
from lit_fed.command.reading.parts import instantiate
from lit_fed.errors import ConfigError
from lit_fed.parsing import Parser
from tests.command.support import command, error_of
from tests.support import rows

SCHEDULE = "--model.init_args.lr_scheduler"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--trainer.logger", "WandbLogger"], r"WandbLogger cannot be made: it needs wandb\S*, which is not installed"),
        (["--trainer.logger", "MLFlowLogger"], r"MLFlowLogger cannot be made: it needs mlflow\S*, which is not"),
        (["--trainer.logger", "CometLogger"], r"CometLogger cannot be made: it needs comet-ml\S*, which is not"),
        (["--trainer.accelerator", "tpu"], r"trainer.accelerator tpu, precision 32-true: it needs torch_xla\S*, which"),
        (
            ["--trainer.precision", "transformer-engine"],
            r"precision transformer-engine: it needs transformer_engine\S*,",
        ),
        (
            ["--model.optimizer", "torch.optim.Muon"],
            r"Muon cannot be made: ValueError: Muon only supports 2D parameters",
        ),
        (
            ["--model.optimizer", "Adam", "--model.optimizer.betas", "[2, 3]"],
            r"Adam cannot be made: ValueError: Invalid",
        ),
        ([SCHEDULE, "ConstantLR", f"{SCHEDULE}.factor", "3"], r"ConstantLR cannot be made: ValueError: Constant"),
        (
            [f"{SCHEDULE}.T_max", "-1"],
            r"lr_scheduler.T_max is -1; it must be a number of rounds, or null for all rounds",
        ),
        (
            ["--model.network_args", "{width: 100000000}"],
            r"network 'small_cnn' cannot be built with .*: there is not enough memory for",
        ),
    ],
)
def test_what_cannot_be_made_is_named_in_a_line(args, expected, capsys):
    assert re.search(expected, error_of(command("fit", *args), capsys))
    assert not Path("lightning_logs").exists()


BROKEN = """
from lit_fed.methods import FedAvg

class Broken(FedAvg):
    def __init__(self, size: int = 3) -> None:
        super().__init__()
        [][size]
"""


def test_where_the_users_own_class_is_broken_its_place_is_shown(tmp_path, monkeypatch, capsys):
    Path("broken_of_test_making.py").write_text(BROKEN)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    with pytest.raises(SystemExit) as stop:
        main(command("fit", "--algorithm", "broken_of_test_making.Broken"))
    printed = capsys.readouterr().err
    assert stop.value.code == 2
    assert 'broken_of_test_making.py", line 7' in printed
    assert printed.splitlines()[-1] == ("lit-fed: error: Broken cannot be made: IndexError: list index out of range")


def test_the_quickstarts_schedule_takes_all_rounds_and_the_learning_rate_is_logged():
    # Cosine annealing from 0.1 over R = 3 rounds: ½·0.1·(1 + cos(πr/3)), and r = 0, 1, 2.
    main(command("fit", "--trainer.max_rounds", "3"))
    run = Path("lightning_logs/version_0")
    rates = [float(row["train/lr"]) for row in rows(run / "metrics.csv")]
    assert rates == pytest.approx([0.05 * (1 + math.cos(math.pi * r / 3)) for r in range(3)])
    written = yaml.safe_load((run / "config.yaml").read_text())["model"]["init_args"]["lr_scheduler"]
    assert written["init_args"]["T_max"] is None, "with more rounds it would no longer be that of all rounds"
    load_network(run)


def test_a_length_that_is_not_the_runs_is_kept_and_told(capsys):
    main(command("fit", "--trainer.max_rounds", "2", f"{SCHEDULE}.T_max", "40"))
    rates = [float(row["train/lr"]) for row in rows(Path("lightning_logs/version_0/metrics.csv"))]
    assert rates == pytest.approx([0.05 * (1 + math.cos(math.pi * r / 40)) for r in range(2)])
    told = (
        "model Classifier: its schedule CosineAnnealingLR is made for 40 rounds, and the run has 2; T_max: null in a "
    )
    assert f"{told}configuration stands for all rounds\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("schedule", "after"),
    [
        # In 4 rounds, from a rate of 1: linearly from ⅓ to 1; PyTorch's one cycle ends at max_lr/25/10⁴ after the last.
        ({"class_path": "LinearLR", "init_args": {"total_iters": None}}, 1.0),
        ({"class_path": "LinearLR"}, 1 / 3 + 4 * (1 - 1 / 3) / 5),  # torch's own 5
        ({"class_path": "OneCycleLR", "init_args": {"max_lr": 2.0}}, 2.0 / 25 / 1e4),
        ({"class_path": "OneCycleLR", "init_args": {"max_lr": 2.0, "epochs": 2, "steps_per_epoch": 2}}, 2.0 / 25 / 1e4),
    ],
)
def test_null_is_all_rounds_and_only_null_is(schedule, after):
    parser = Parser(exit_on_error=False)
    parser.add_argument("--schedule", type=LRSchedulerCallable)
    made = instantiate(parser, parser.parse_object({"schedule": schedule}), max_rounds=4).schedule
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = made(optimizer)
    optimizer.step()
    for _ in range(4 if "LinearLR" in schedule["class_path"] else 3):  # a cycle of n steps has n values
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(after)


def test_a_missing_length_without_rounds_to_take_is_an_error_of_the_schedule():
    parser = Parser(exit_on_error=False)
    parser.add_argument("--schedule", type=LRSchedulerCallable)
    settings = parser.parse_object({"schedule": {"class_path": "OneCycleLR", "init_args": {"max_lr": 2.0}}})
    made = instantiate(parser, settings).schedule
    with pytest.raises(ConfigError, match="OneCycleLR cannot be made: ValueError: You must define either total_steps"):
        made(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
