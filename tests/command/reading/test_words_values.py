"""Values that no number can have, in every kind of place."""

from __future__ import annotations

from pathlib import Path

import pytest
from jsonargparse import Namespace

from lit_fed.command.reading.words import check_values
from lit_fed.errors import ConfigError
from tests.command.support import LR, command, error_of

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


@pytest.mark.parametrize("name", ["test", "cost"])
def test_every_command_looks(name, capsys):
    assert error_of(command(name, LR, ".nan"), capsys) == "model.optimizer.lr is nan; it must be a finite number"


def test_a_simulation_needs_a_process(capsys):
    Path("f.yaml").write_text("simulate: {class_path: lit_fed.papers.fedfrozen.Figure2}\n")
    message = error_of(["simulate", "-c", "f.yaml", "--processes", "0"], capsys)
    assert message == "processes is 0; it must be at least 1"


@pytest.mark.parametrize("option", ["--jobs", "--processes"])
def test_so_do_commands_with_options_of_their_own(option, capsys):
    file = Path("f.yaml")
    file.write_text("simulate: {class_path: lit_fed.papers.fedfrozen.Figure2}\n")
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
