"""Commands on the quickstart, and what those that fail print."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lit_fed.command.cli import main
from tests.support import ROOT

QUICKSTART = ROOT / "configs" / "quickstart.yaml"
QUIET = ("--trainer.logger", "false", "--trainer.enable_progress_bar", "false")
LR = "--model.init_args.optimizer.init_args.lr"


def command(name: str, *args: str | Path) -> list[str]:
    return [name, "-c", str(QUICKSTART), *QUIET, *(str(arg) for arg in args)]


def error_of(args: list[str], capsys: Any, status: int = 2) -> str:
    """What a command that fails prints, which must be one line; status 2: the input was wrong, 1: a run failed."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(args)
    lines = capsys.readouterr().err.splitlines()
    assert stop.value.code == status
    assert len(lines) == 1, lines
    assert lines[0].startswith("lit-fed: error: ")
    assert "Namespace(" not in lines[0]
    assert "<class" not in lines[0]
    return lines[0].removeprefix("lit-fed: error: ")


def settings_of(args: list[str], capsys: Any) -> Any:
    """What a command comes to, by ``--print_config``."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main([*args, "--print_config"])
    assert stop.value.code == 0
    return yaml.safe_load(capsys.readouterr().out)
