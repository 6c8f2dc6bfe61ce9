"""Every spelling of an option gives the same run or the same refusal, and every file is opened once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lit_fed.command.cli import main
from tests.command.support import QUICKSTART, command, error_of, settings_of
from tests.support import ROOT

ADAM = "{class_path: torch.optim.Adam}"
WHOLE = {
    "good.yaml": f"model: {{init_args: {{optimizer: {ADAM}}}}}\ntrainer: {{max_rounds: 3}}\n",
    "broken.yaml": "trainer: [1\n",
    "empty.yaml": "",
}
PART = {
    "good.yaml": f"class_path: Classifier\ninit_args: {{network: mlp, optimizer: {ADAM}}}\n",
    "broken.yaml": "class_path: [1\n",
    "empty.yaml": "",
}
OF_A_FILE = (("-c", "{0}"), ("-c{0}",), ("-c={0}",), ("--config", "{0}"), ("--config={0}",))
OF_A_PART = (("--model", "{0}"), ("--model={0}",))
REFUSALS = {
    "missing.yaml": "config file missing.yaml does not exist",
    "broken.yaml": "config file broken.yaml, line 2: expected ',' or ']', but got '<stream end>'",
    "empty.yaml": "config file empty.yaml holds no settings; write keys such as trainer:, model:, data: and algorithm:",
}
TORCH_ADAM_RATE = 0.001  # torch's default; the quickstart's SGD has 0.1


def spelled(spelling: tuple[str, ...], value: str) -> list[str]:
    return command("fit", *(word.format(value) for word in spelling))


@pytest.fixture(params=["whole", "part"])
def spellings(request: pytest.FixtureRequest) -> tuple[tuple[str, ...], ...]:
    """Spellings of one option, with the files that it may name in the working directory."""
    for name, text in (WHOLE if request.param == "whole" else PART).items():
        Path(name).write_text(text)
    return OF_A_FILE if request.param == "whole" else OF_A_PART


def test_every_spelling_of_a_good_file_gives_the_same_run(spellings: Any, capsys: Any) -> None:
    first, *others = [settings_of(spelled(spelling, "good.yaml"), capsys) for spelling in spellings]
    assert first["model"]["init_args"]["optimizer"]["class_path"] == "torch.optim.Adam"
    assert first["model"]["init_args"]["optimizer"]["init_args"]["lr"] == TORCH_ADAM_RATE
    assert all(other == first for other in others)


@pytest.mark.parametrize("file", REFUSALS)
def test_every_spelling_of_a_bad_file_gives_the_same_refusal(file: str, spellings: Any, capsys: Any) -> None:
    assert {error_of(spelled(spelling, file), capsys) for spelling in spellings} == {REFUSALS[file]}


@pytest.mark.parametrize("short", [("-c",), ("--config",)])
@pytest.mark.parametrize("after", [(), ("--trainer.seed", "1"), ("--trainer.seed=1",)])
def test_an_option_without_its_file_says_so(short: tuple[str, ...], after: tuple[str, ...], capsys: Any) -> None:
    assert error_of([*command("fit"), *short, *after], capsys) == f"{short[0]} needs a value"


@pytest.mark.parametrize(
    "spellings",
    [
        (
            ["--model.optimizer", "Adam"],
            ["--model.optimizer=Adam"],
            ["--model.init_args.optimizer", "torch.optim.Adam"],
            ["--model.init_args.optimizer=torch.optim.Adam"],
            ["--model.optimizer", ADAM],
            [f"--model.optimizer={ADAM}"],
            ["--model.optimizer", "adam.yaml"],
            ["--model.optimizer=adam.yaml"],
            ["-c", f"{{model: {{init_args: {{optimizer: {ADAM}}}}}}}"],
            ["-c", "folder/names_a_file.yaml"],
            ["-c", "folder/names_a_whole_file.yaml"],
        ),
        (["--model.optimizer.lr", "-0.5"], ["--model.optimizer.lr=-0.5"], ["--model.init_args.optimizer.lr=-0.5"]),
        (["--trainer.local_epochs", "None"], ["--trainer.local_epochs=None"], ["--trainer.local_epochs=null"]),
        (["--trainer.callbacks+", "EarlyStopping"], ["--trainer.callbacks+=EarlyStopping"]),
    ],
    ids=["an optimizer", "a negative number", "null", "an item"],
)
def test_every_spelling_of_a_setting_gives_the_same_run(spellings: Any, capsys: Any) -> None:
    Path("adam.yaml").write_text("class_path: torch.optim.Adam\n")
    Path("folder").mkdir()
    for name, text in (
        ("adam.yaml", "class_path: torch.optim.Adam\n"),
        ("names_a_file.yaml", "model: {class_path: Classifier, init_args: {optimizer: adam.yaml}}\n"),
        ("names_a_whole_file.yaml", "config: names_a_file.yaml\n"),
    ):
        (Path("folder") / name).write_text(text)
    first, *others = [settings_of(command("fit", *words), capsys) for words in spellings]
    assert first != settings_of(command("fit"), capsys)
    assert all(other == first for other in others)


def test_every_spelling_of_a_class_that_is_none_gives_the_same_refusal(capsys: Any) -> None:
    words = (["--model.optimizer", "Adamm"], ["--model.optimizer=Adamm"], ["--model.init_args.optimizer=Adamm"])
    (line,) = {error_of(command("fit", *each), capsys) for each in words}
    assert "Adamm" in line


def test_a_file_that_names_itself_is_refused(capsys: Any) -> None:
    Path("loop.yaml").write_text("config: loop.yaml\ntrainer: {seed: 1}\n")
    assert "loop" in error_of(command("fit", "-c", "loop.yaml"), capsys)


RECORDER = """
import json, os, sys
opened = []
def hook(event, args):
    if event == "open" and isinstance(args[0], str) and args[0].endswith(".yaml") and args[1] in ("r", "rb"):
        opened.append(os.path.realpath(args[0]))
sys.addaudithook(hook)
from lit_fed.command.start import main
main(sys.argv[2:])
with open(sys.argv[1], "w") as file:
    json.dump(opened, file)
"""


def test_a_fit_opens_each_of_its_files_once() -> None:
    Path("parts").mkdir()
    files = {
        "data.yaml": "data: {init_args: {num_clients: 4}}\n",
        "whole.yaml": "config: parts/inner.yaml\nmodel: parts/model.yaml\n",
        "parts/inner.yaml": "trainer: trainer.yaml\n",
        "parts/trainer.yaml": "max_rounds: 1\nparticipation: who.yaml\n",
        "parts/who.yaml": "class_path: UniformParticipation\ninit_args: {count: 2}\n",
        "parts/model.yaml": "class_path: Classifier\ninit_args: {network: mlp, optimizer: adam.yaml}\n",
        "parts/adam.yaml": "class_path: torch.optim.Adam\n",
        "iid.yaml": "class_path: IID\n",
    }
    for name, text in files.items():
        Path(name).write_text(text)
    words = command("fit", "-cdata.yaml", "--config=whole.yaml", "--data.partition", "iid.yaml")
    env = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(
        [sys.executable, "-c", RECORDER, "opened.json", *words], env=env, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    here = [os.path.realpath(name) for name in files]
    opened = json.loads(Path("opened.json").read_text())
    counts = {os.path.relpath(path): opened.count(path) for path in [*here, os.path.realpath(QUICKSTART)]}
    assert set(counts.values()) == {1}, counts
    assert Path("lightning_logs/version_0/metrics.csv").is_file()


def test_the_parser_parses_no_file_again(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from lit_fed.yaml_text import SettingsLoader

    parsed: list[str] = []

    class Recorded(SettingsLoader):
        def __init__(self, text: str) -> None:
            parsed.append(text)
            super().__init__(text)

    monkeypatch.setattr("lit_fed.yaml_text.SettingsLoader", Recorded)
    Path("my.yaml").write_text("trainer: {max_rounds: 1}\n")
    with pytest.raises(SystemExit):
        main(command("fit", "-c", "my.yaml", "--print_config"))
    assert parsed.count("trainer: {max_rounds: 1}\n") == 1
    assert parsed.count(QUICKSTART.read_text(encoding="utf-8")) == 1
