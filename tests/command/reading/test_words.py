"""Optimizers and schedules that take the place of others: nothing leaks from one into the next."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.cli import OptimizerCallable

from lit_fed import Classifier
from lit_fed.command.cli import main
from lit_fed.command.reading.words import CommandLine
from lit_fed.parsing import Parser
from lit_fed.studies.simulations import run_simulation
from tests.command.support import LR, command, error_of, settings_of
from tests.studies.support import grid_of

ADAMW = inspect.signature(torch.optim.AdamW).parameters
ADAMW_IN_A_FILE = "model:\n  init_args:\n    optimizer:\n      class_path: torch.optim.AdamW\n"


class Mine(Classifier):
    """Hands on what it does not know, and has an optimizer of its own."""

    def __init__(self, optimizer: OptimizerCallable = lambda p: torch.optim.Adagrad(p, lr=7.0), **kwargs: Any) -> None:
        super().__init__(optimizer=optimizer, **kwargs)


def optimizer_of(args: list[str], capsys: Any) -> tuple[str, dict[str, Any]]:
    found = settings_of(args, capsys)["model"]["init_args"]["optimizer"]
    return found["class_path"].rpartition(".")[2], found["init_args"]


@pytest.mark.parametrize("start", [command("fit"), ["fit", "--data", "Digits", "--algorithm", "FedAvg"]])
@pytest.mark.parametrize(
    "args",
    [
        ["--model.optimizer", "AdamW"],
        ["--model.init_args.optimizer", "torch.optim.AdamW"],
        ["--model.optimizer.class_path=torch.optim.AdamW"],
        ["--model.optimizer={class_path: torch.optim.AdamW}"],
        ["--model.optimizer", "Adagrad", "--model.optimizer", "AdamW"],
        ["--model={init_args: {optimizer: {class_path: torch.optim.AdamW}}}"],
        ["-c", "adamw.yaml"],
        ["--model", "model.yaml"],
    ],
    ids=" ".join,
)
def test_another_optimizer_begins_with_its_own_settings(args: list[str], start: list[str], capsys: Any) -> None:
    Path("adamw.yaml").write_text(ADAMW_IN_A_FILE)
    Path("model.yaml").write_text("class_path: Classifier\ninit_args: {optimizer: {class_path: torch.optim.AdamW}}\n")
    name, settings = optimizer_of([*start, "--model", "Classifier", *args], capsys)
    assert name == "AdamW"
    own = {key: list(p.default) if key == "betas" else p.default for key, p in ADAMW.items() if key != "params"}
    assert settings == own  # a weight decay of 0.01 and a learning rate of 0.001 among them


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--model.optimizer", "AdamW", LR, "0.5"], {"lr": 0.5, "weight_decay": 0.01}),
        ([LR, "0.5", "--model.optimizer", "AdamW"], {"lr": 0.5, "weight_decay": 0.01}),
        ([LR, "0.5", "-c", "adamw.yaml"], {"lr": 0.5, "weight_decay": 0.01}),
        (["-c", "adamw.yaml", "-c", "slow.yaml"], {"lr": 0.25, "weight_decay": 0.01}),
        (["-c", "slow.yaml", "-c", "adamw.yaml"], {"lr": 0.001, "weight_decay": 0.01}),  # it was SGD's
        (["--model.optimizer", "{class_path: torch.optim.AdamW, init_args: {lr: 3}}"], {"lr": 3, "weight_decay": 0.01}),
        (["--model.optimizer", "AdamW", "--model.optimizer", "SGD"], {"lr": 0.001, "momentum": 0}),
        (["--model.optimizer", "SGD"], {"lr": 0.1, "momentum": 0}),  # the same one: what the file says stays
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_asked_for_stays(args: list[str], expected: dict[str, Any], capsys: Any) -> None:
    Path("adamw.yaml").write_text(ADAMW_IN_A_FILE)
    Path("slow.yaml").write_text("model: {init_args: {optimizer: {init_args: {lr: 0.25}}}}\n")
    assert optimizer_of(command("fit", *args), capsys)[1].items() >= expected.items()


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--algorithm.mu", "3", "--algorithm", "FedProx"], {"mu": 3.0}),  # before its class
        (["--algorithm", "FedProx", "--algorithm.mu", "3", "--algorithm", "Moon"], {"mu": 3.0}),  # both take it
        (
            ["--algorithm", "FedProx", "--algorithm.mu", "3", "--algorithm", "FedAvg", "--algorithm", "FedProx"],
            {"mu": 0.01},
        ),
        (["--algorithm", "{init_args: {weighting: uniform}}", "--algorithm", "FedProx"], {"weighting": "uniform"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_class_keeps_the_settings_that_the_class_before_it_takes_too(args: Any, expected: Any, capsys: Any) -> None:
    found = settings_of(command("fit", *args), capsys)["algorithm"]["init_args"]
    assert found.items() >= expected.items()


def test_a_setting_that_no_class_takes_is_refused_however_often_the_class_changes(capsys: Any) -> None:
    args = ["--model.optimizer.momentumm", "0.9", "--model.optimizer", "AdamW"]
    assert "unknown key model.init_args.optimizer.init_args.momentumm" in error_of(command("fit", *args), capsys)


def test_a_models_own_default_does_not_leak_either(capsys: Any) -> None:
    mine = ["fit", "--data", "Digits", "--algorithm", "FedAvg", "--model", "tests.command.reading.test_words.Mine"]
    assert optimizer_of(mine, capsys)[1]["lr"] == 7
    assert optimizer_of([*mine, "--model.optimizer", "Adam"], capsys)[1]["lr"] == 0.001  # torch's default


def test_another_schedule_begins_with_its_own_settings(capsys: Any) -> None:
    warm = ("--model.lr_scheduler", "CosineAnnealingWarmRestarts", "--model.lr_scheduler.T_0", "5")
    minimum = ("--model.lr_scheduler.eta_min", "0.01")

    def schedule(*args: str) -> Any:
        return settings_of(command("fit", *args), capsys)["model"]["init_args"]["lr_scheduler"]["init_args"]

    Path("low.yaml").write_text("model: {init_args: {lr_scheduler: {init_args: {eta_min: 0.05}}}}\n")
    assert schedule("-c", "low.yaml") == {"T_max": None, "eta_min": 0.05, "last_epoch": -1}
    assert schedule("-c", "low.yaml", *warm) == {"T_0": 5, "T_mult": 1, "eta_min": 0.0, "last_epoch": -1}
    assert schedule("-c", "low.yaml", *warm, *minimum)["eta_min"] == 0.01


def test_a_learning_rate_that_nobody_asked_for_is_said(capsys: Any) -> None:
    def said(*args: str) -> list[str]:
        capsys.readouterr()
        main(command("fit", "--trainer.max_rounds", "1", *args))
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("optimizer ")]

    line = "optimizer AdamW takes its own learning rate, 0.001; set model.optimizer.lr for another"
    assert said("--model.optimizer", "AdamW") == [line]
    assert said("--model.optimizer", "torch.optim.AdamW", LR, "0.01") == []
    assert said() == []


def test_a_cell_of_a_study_takes_them_too(tmp_path: Path) -> None:
    rows = {"sgd": {}, "adamw": {"set": {"model.init_args.optimizer": "torch.optim.AdamW"}}}
    cells = grid_of(tmp_path, rows=rows).cells
    found = {cell.row: cell.config["model"]["init_args"]["optimizer"]["init_args"] for cell in cells}
    assert (found["adamw"]["lr"], found["adamw"]["weight_decay"]) == (0.001, 0.01)


def test_what_was_said_last_comes_first_in_the_comparison_of_runs() -> None:
    Path("base.yaml").write_text("trainer: {max_rounds: 3}\nmodel: {class_path: M, init_args: {a: 1, b: {c: 2}}}\n")
    Path("method.yaml").write_text("algorithm: {class_path: FedProx, init_args: {mu: 0.1}}\n")
    words = ["fit", "-c", "base.yaml", "--config=method.yaml", "--model.init_args.a=7", "--trainer.seed", "3"]
    assert CommandLine(words).given_keys == (
        *("trainer.seed", "model.a", "algorithm.class_path", "algorithm.mu"),
        *("trainer.max_rounds", "model.class_path", "model.b.c"),
    )


@pytest.mark.parametrize(("words", "processes"), [([], 4), (["--processes", "3"], 3)])
def test_an_option_of_the_command_wins_over_its_file(words: list[str], processes: int) -> None:
    Path("figure.yaml").write_text("simulate: {class_path: lit_fed.studies.papers.fedfrozen.Figure2}\nprocesses: 4\n")
    parser = Parser(exit_on_error=False)
    run_simulation.add_arguments(parser)
    assert CommandLine(["simulate", *words, "-c", "figure.yaml"]).parse(parser).processes == processes


def test_a_protocol_is_added_to_those_that_a_trainer_has_without_any(capsys: pytest.CaptureFixture[str]) -> None:
    def protocols(*words: str) -> list[str]:
        found = settings_of(command("fit", *words), capsys)["trainer"]["protocols"]
        return [one["class_path"].rpartition(".")[2] for one in found]

    assert protocols("--trainer.protocols+=PersonalTest") == ["GlobalTest", "ClientTest", "PersonalTest"]
    assert protocols("--trainer.protocols=PersonalTest", "--trainer.protocols+=UnseenTest") == [
        "PersonalTest",
        "UnseenTest",
    ]


def test_a_list_of_an_option_takes_the_place_of_a_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of one length too, where a file's items would be merged; a class of Lightning's name is not taken for ours."""
    (tmp_path / "stop.yaml").write_text("trainer: {callbacks: [{class_path: Checkpoint, init_args: {monitor: a}}]}\n")
    (tmp_path / "other.yaml").write_text("trainer: {callbacks: [{class_path: TeacherError, init_args: {epochs: 3}}]}\n")

    def callback(*words: object) -> dict[str, Any]:
        (one,) = settings_of(command("fit", "-c", tmp_path / "stop.yaml", *words), capsys)["trainer"]["callbacks"]
        return dict(one["init_args"])

    assert callback()["monitor"] == "a"
    assert callback("--trainer.callbacks", "[{class_path: Checkpoint, init_args: {mode: min}}]")["monitor"] == "auto"
    assert callback("-c", tmp_path / "other.yaml")["epochs"] == 3
