"""Configuration files that YAML and the parser would take without a word, and not as their reader does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_fed.command.cli import main
from tests.command.support import QUICKSTART, command, error_of, settings_of
from tests.support import rows


def written(text: str, path: str = "bad.yaml") -> str:
    Path(path).write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "trainer:\n  seed: 1\n  max_rounds: 2\n  seed: 3\n",
            "line 4: trainer.seed is given twice, also in line 2; rem",
        ),
        (
            "trainer: {seed: 1}\nmodel: Classifier\ntrainer: {}\n",
            "line 3: trainer is given twice, also in line 1; remove",
        ),
        ("trainer: {seed: 1, seed: 1}\n", "line 1: trainer.seed is given twice, in this line too; remove one"),
        (
            "model:\n  init_args:\n    optimizer:\n      init_args:\n        lr: 1\n        lr: 2\n",
            "line 6: model.init_args.optimizer.init_args.lr is given twice, also in line 5; remove one",
        ),
        (
            "trainer:\n  callbacks:\n  - {class_path: A, class_path: B}\n",
            "line 3: trainer.callbacks.class_path is given tw",
        ),
        ("trainer: null\n", "line 1: trainer is null; it must hold settings, such as max_rounds"),
        ("data: Digits\ntrainer:\n", "line 2: trainer is null; it must hold settings, such as max_rounds"),
        ("trainer: []\n", "line 1: trainer is a list; it must hold settings, such as max_rounds"),
        ("trainer: true\n", "line 1: trainer is true; it must hold settings, such as max_rounds"),
        *(
            (f"{key}: {value}\n", f"line 1: {key} is {named}; it must hold class_path and init_args")
            for key in ("model", "data", "algorithm")
            for value, named in (("null", "null"), ("[]", "a list"), ("7", "7"))
        ),
        (
            "model:\n  init_args:\n",
            "line 2: model.init_args is null; it must hold settings of the class, or be left out",
        ),
        ("trainer: !!set {max_rounds}\n", "line 1: !!set cannot be a setting; write a number, text,"),
        ("trainer:\n  seed: !!binary aGk=\n", "line 2: !!binary cannot be a setting"),
        ("data: {init_args: []}\n", "line 1: data.init_args is a list; it must hold settings of the class"),
        (
            "trainer:\n  callbacks:\n  - class_path: EarlyStopping\n    init_args: null\n",
            "line 4: trainer.callbacks.init_args is null; it must hold settings of the class, or be left out",
        ),
        (
            "trainer: {seed: 1}\ntrainer.max_rounds: 3\n",
            "line 2: the key trainer.max_rounds has dots, as options have; write max_rounds in a line below trainer:",
        ),
        ("trainer:\n  participation.count: 3\n", "line 2: the key participation.count of trainer has dots, as options"),
        (
            "model: {optimizer.lr: 3}\n",
            "line 1: the key optimizer.lr of model has dots, as options have; write lr in a",
        ),
        (
            "model:\n  init_args:\n    optimizer.lr: 3\n",
            "line 3: the key optimizer.lr of model.init_args has dots, as opt",
        ),
    ],
    ids=lambda value: value[:40].strip(),
)
@pytest.mark.parametrize("subcommand", ["fit", "cost"])
def test_what_would_be_misread_is_named_with_its_line(subcommand: str, text: str, expected: str, capsys: Any) -> None:
    words = command("fit") if subcommand == "fit" else ["cost", "-c", str(QUICKSTART)]
    assert error_of([*words, "-c", written(text)], capsys).startswith(f"config file bad.yaml, {expected}")
    assert not Path("lightning_logs").exists()


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            ["--trainer", "part.yaml"],
            "config file part.yaml, line 2: seed is given twice, also in line 1; remove one",
        ),
        (
            ["-c", "whole.yaml"],
            "config file part.yaml, line 2: seed is given twice, also in line 1; remove one",
        ),
        (["--trainer.kinds", "{a: {}, a: {}}"], "--trainer.kinds: a is given twice, in this line too; remove one"),
        (
            ["--model={init_args: {network: mlp, network: mlp}}"],
            "--model: init_args.network is given twice, in this line",
        ),
    ],
)
def test_keys_twice_in_files_of_files_and_in_options(args: list[str], expected: str, capsys: Any) -> None:
    written("seed: 1\nseed: 2\n", "part.yaml")
    written("trainer: part.yaml\n", "whole.yaml")
    assert expected in error_of([*command("fit"), *args], capsys)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trainer:\n  seed: 1\n  max_rounds: many\n", "line 3: trainer.max_rounds: expected a whole number, not many"),
        ("trainer:\n  max_round: 4\n", "line 2: unknown key trainer.max_round; did you mean trainer.max_rounds?"),
        (
            "algorithm:\n  init_args:\n    mue: 1\n  class_path: FedProx\n",
            "line 3: unknown key algorithm.init_args.mue",
        ),
        ("algorithm:\n  init_args: {}\n  class_path: FedProxx\n", "line 3: algorithm: there is no Algorithm named"),
        ("data:\n  init_args:\n    partition: {alpha: lots}\n", "line 3: data.init_args.partition.init_args.alpha"),
        ("algorithm:\n  class_path: FedProx\n  init_args:\n    mu: .nan\n", "line 4: algorithm.mu is nan; it must be"),
        ("model: {init_args: {lr_scheduler: StepLR}}\n", "line 1: model.init_args.lr_scheduler.init_args.step_size is"),
        ("trainer: part.yaml\n", "trainer.participation: there is no Participation named 'Who'"),
    ],
    ids=lambda value: value[:40].strip(),
)
def test_a_mistake_in_a_file_is_named_with_its_line(text: str, expected: str, capsys: Any) -> None:
    written("seed: 1\nparticipation:\n  class_path: Who\n", "part.yaml")
    where = "part.yaml, line 3: " if "part.yaml" in text else "bad.yaml, "
    assert error_of([*command("fit"), "-c", written(text)], capsys).startswith(f"config file {where}{expected}")


def test_keys_twice_in_a_simulation(capsys: Any) -> None:
    written("simulate:\n  class_path: AttentionKernel\nsimulate: {}\n")
    assert error_of(["simulate", "-c", "bad.yaml"], capsys).startswith(
        "config file bad.yaml, line 3: simulate is given tw"
    )


def test_a_quoted_number_is_that_number_and_a_merge_key_no_second_one(capsys: Any) -> None:
    lr = "model: {{init_args: {{optimizer: {{init_args: {{lr: {}}}}}}}}}\ntrainer: {{max_rounds: {}}}\n"
    plain = settings_of([*command("fit"), "-c", written(lr.format("0.25", "7"))], capsys)
    assert (plain["model"]["init_args"]["optimizer"]["init_args"]["lr"], plain["trainer"]["max_rounds"]) == (0.25, 7)
    for quoted in (lr.format('"0.25"', "'7'"), lr.format('"2.5e-1"', '"7"')):
        assert settings_of([*command("fit"), "-c", written(quoted)], capsys) == plain
    merged = "model:\n  init_args:\n    network_args:\n      <<: {a.b: 1}\n      <<: {hidden: [3]}\n      hidden: [4]\n"
    network = settings_of([*command("fit"), "-c", written(merged)], capsys)["model"]["init_args"]
    assert network["network_args"] == yaml.safe_load(merged)["model"]["init_args"]["network_args"]


def test_a_quoted_learning_rate_trains_as_the_number(capsys: Any) -> None:
    written('model: {init_args: {optimizer: {init_args: {lr: "0.25"}}}}\n')
    short = ("--trainer.max_rounds", "1", "--data.num_clients", "5")
    main(command("fit", *short, "-c", "bad.yaml"))
    main(command("fit", *short, "--model.optimizer.lr", "0.25"))
    one, other = (rows(Path(f"lightning_logs/version_{version}/metrics.csv"))[0] for version in (0, 1))
    assert one["train/loss"] == other["train/loss"]
    assert one["global/loss"] == other["global/loss"]


@pytest.mark.parametrize("name", ["fit", "cost"])
def test_a_text_that_no_file_can_hold_is_refused(name, tmp_path, capsys):
    path = tmp_path / "more.yaml"
    path.write_text('trainer: {default_root_dir: "\\ud800"}\n', encoding="utf-8")
    told = error_of(command(name, "-c", str(path)), capsys)
    assert told.endswith("'\\ud800' holds a lone surrogate, half of a character")
