"""Values that no number can have, in every kind of place."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from jsonargparse import Namespace

from lit_fed.command.reading.words import check_values
from lit_fed.errors import ConfigError
from tests.command.support import LR, command, error_of, settings_of

HUGE = str(10**30)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([LR, ".nan"], "model.optimizer.lr is nan; it must be a finite number"),
        ([LR, ".inf"], "model.optimizer.lr is inf; it must be a finite number"),
        ([f"{LR}=-.inf"], "model.optimizer.lr is -inf; it must be a finite number"),
        ([LR, "1e400"], "model.optimizer.lr is inf; it must be a finite number"),
        (["--trainer.gradient_clip_val", ".nan"], "trainer.gradient_clip_val is nan"),
        (["--trainer.local_epochs", ".inf"], "trainer.local_epochs is inf"),
        (["--data.partition.alpha", ".nan"], "data.partition.alpha is nan"),
        (["--algorithm", "FedProx", "--algorithm.mu", ".inf"], "algorithm.mu is inf"),
        (["--model.network_args", "{width: .nan}"], "model.network_args.width is nan"),
        (["--trainer.kinds", "{a: {network_args: {hidden: [.nan]}}}"], "trainer.kinds.a.network_args.hidden is nan"),
        (["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.min_delta", ".inf"], "callbacks.min_delta is inf"),
        (
            ["--trainer.max_rounds", HUGE],
            "trainer.max_rounds is 100000… (31 digits); whole numbers must be below 2**63",
        ),
        (
            ["--data.batch_size", str(2**63)],
            "data.batch_size is 9223372036854775808; whole numbers must be below 2**63",
        ),
        (["--data.seed", HUGE], "data.seed is 100000… (31 digits)"),
        (["--data.partition", "Shards", "--data.partition.shards_per_client", HUGE], "shards_per_client is 100000…"),
        (["--trainer.num_threads", HUGE], "trainer.num_threads is 100000…"),
        (["--trainer.devices", HUGE], "trainer.devices is 100000…"),
        (["--trainer.default_root_dir", "a\0b"], "a text cannot hold the character NUL"),
    ],
)
def test_a_value_that_no_number_can_have_is_named_with_its_key(args, expected, capsys):
    assert expected in error_of(command("fit", *args), capsys)
    assert not Path("lightning_logs").exists()


@pytest.mark.parametrize("text", ["1:10", "1:10.5", "+010", "0_10", "-1:10:10"])
@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("trainer.max_rounds", "a whole number"),
        ("trainer.local_epochs", "a number"),
        ("trainer.gradient_clip_val", "a number"),
        ("data.init_args.batch_size", "a whole number"),
        ("model.init_args.optimizer.init_args.lr", "a number"),
    ],
)
def test_a_number_of_yaml_1_1_in_base_8_or_60_is_refused(key, kind, text, capsys):
    """YAML 1.1 reads 1:10 as 70, in minutes, and +010 as 8."""
    expected = f"{key}: expected {kind}, not {text}"
    assert error_of(command("fit", f"--{key}={text}"), capsys) == expected
    content = text
    for name in reversed(key.split(".")):
        content = {name: content}
    Path("old.yaml").write_text(yaml.safe_dump(content).replace(f"'{text}'", text))
    assert error_of(command("fit", "-c", "old.yaml"), capsys).endswith(expected)


def test_a_whole_number_with_a_leading_zero_is_decimal(capsys):
    assert settings_of(command("fit", "--trainer.max_rounds", "010"), capsys)["trainer"]["max_rounds"] == 10
    Path("old.yaml").write_text("trainer: {max_rounds: 010, local_epochs: 012}")
    trainer = settings_of(command("fit", "-c", "old.yaml"), capsys)["trainer"]
    assert (trainer["max_rounds"], trainer["local_epochs"]) == (10, 12.0)


def test_a_time_is_no_number_in_base_60(capsys):
    given = command("fit", "--trainer.max_time", "00:01:10:00")
    assert settings_of(given, capsys)["trainer"]["max_time"] == "00:01:10:00"


@pytest.mark.parametrize(("text", "value"), [("1", 1), ("1.0", 1.0), ("0.5", 0.5), ("2", 2), ("null", None)])
def test_a_number_of_batches_and_a_share_of_them_stay_apart(text, value, capsys):
    read = settings_of(command("fit", "--trainer.limit_train_batches", text), capsys)["trainer"]["limit_train_batches"]
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize("name", ["test", "cost"])
def test_every_command_looks(name, capsys):
    assert error_of(command(name, LR, ".nan"), capsys) == "model.optimizer.lr is nan; it must be a finite number"


def test_a_simulation_needs_a_process(capsys):
    Path("f.yaml").write_text("simulate: {class_path: lit_fed.studies.papers.fedfrozen.Figure2}\n")
    message = error_of(["simulate", "-c", "f.yaml", "--processes", "0"], capsys)
    assert message == "processes is 0; it must be at least 1"


@pytest.mark.parametrize("option", ["--jobs", "--processes"])
def test_so_do_commands_with_options_of_their_own(option, capsys):
    file = Path("f.yaml")
    file.write_text("simulate: {class_path: lit_fed.studies.papers.fedfrozen.Figure2}\n")
    name = "study" if option == "--jobs" else "simulate"
    message = error_of([name, "-c", str(file), option, HUGE], capsys)
    assert message == f"{option[2:]} is 100000… (31 digits); whole numbers must be below 2**63"


class Unlimited:
    def __init__(self, limit: float = float("inf"), rate: float = 1.0) -> None:
        pass


def test_what_a_class_has_by_default_is_its_own_business():
    def given(**init_args: float) -> Namespace:
        return Namespace(a=Namespace(class_path=f"{__name__}.Unlimited", init_args=Namespace(**init_args)))

    check_values(given(limit=float("inf"), rate=1.0))
    with pytest.raises(ConfigError, match=r"a\.rate is inf"):
        check_values(given(limit=float("inf"), rate=float("inf")))
    with pytest.raises(ConfigError, match=r"a\.limit is nan"):
        check_values(given(limit=float("nan"), rate=1.0))
