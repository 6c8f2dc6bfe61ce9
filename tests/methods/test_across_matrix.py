"""Which method runs on what: every file in configs/method/ on six models, for two rounds or refused in one line.

The table stands in docs/methods.md. Run with ``LIT_FED_WRITE_MATRIX=1`` (on one worker) the tests write it; else they
compare with it.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from lit_fed.command.cli import main
from lit_fed.engine.method.algorithm import NEEDS
from tests.engine.stranger_support import CONFIGS
from tests.support import ROOT, rows

DOCS = ROOT / "docs" / "methods.md"
METHODS = sorted((CONFIGS / "method").glob("*.yaml"))
BEGIN, END = "<!-- matrix:begin -->\n", "<!-- matrix:end -->"
WRITE = "LIT_FED_WRITE_MATRIX"

SMALL = {
    "trainer.max_rounds": "2",
    "trainer.local_epochs": "1",
    "trainer.participation.init_args.count": "2",
    "trainer.enable_progress_bar": "false",
    "trainer.logger": "false",
    "data.init_args.num_clients": "4",
    "data.init_args.partition.init_args.alpha": "10",
    "data.init_args.drop_last": "true",  # batch norm needs two samples
}
POSES = "`KeypointEstimator`"
DIGITS = ["--data.init_args.max_train_samples", "400", "--data.init_args.seed", "0"]  # no last batch of one
STRANGER = ["--model", "strangers_in_cwd.Net", *DIGITS]
COLUMNS = {
    "`Classifier`": ["--model.init_args.network", "mlp", *DIGITS],
    "`Regressor`": [
        *("--model", "Regressor", "-c", str(CONFIGS / "data" / "diabetes.yaml")),
        *("-c", str(CONFIGS / "network" / "mlp_16.yaml")),
        *("--model.init_args.optimizer.init_args.lr", "0.01"),
    ],
    "a stranger's": STRANGER,
    "with `head`": [*STRANGER, "--algorithm.init_args.head", "classifier"],
    "a GAN by hand": ["--model", "strangers_in_cwd.LatentGAN", *DIGITS],
    POSES: [
        *("--model", "KeypointEstimator", "-c", str(CONFIGS / "data" / "puppets.yaml")),
        *("-c", str(CONFIGS / "network" / "pose_vit_tiny.yaml")),
        *("--model.init_args.network_args", "{depth: 1, embed_dim: 16}", "--data.init_args.num_clients", "4"),
        *("--data.init_args.samples_per_client", "40", "--data.init_args.test_samples", "8"),
        *("--data.init_args.resolutions", "[[32, 24], [16, 12]]", "--data.init_args.test_resolutions", "null"),
        *("--data.init_args.interpolations", "null", "--data.init_args.batch_size", "20"),
    ],
}
OWN = {
    ("fedbn", "`Classifier`"): ["--model.init_args.network", "test_resnet", *DIGITS],
    ("fedfrozen", "`Classifier`"): ["-c", str(CONFIGS / "network" / "vit_pocket.yaml"), *DIGITS],
    **{
        (name, "`Classifier`"): [*COLUMNS["`Classifier`"], "-c", str(CONFIGS / "network" / "lora.yaml")]
        for name in ("fedex_lora", "fedit", "fedsa_lora", "ffa_lora", "flora", "hetlora")
    },
}
"""A method's own network, where it asks for one."""

MISSING = {
    **{
        need: f"no {word}"
        for need, word in {
            "loss": "loss",
            "logits": "logits",
            "features": "features",
            "head": "head",
            "targets": "labels",
            "outputs": "outputs",
            "levels": "levels",
            "classes": "classes",
            "forward": "forward",
            "one_optimizer": "single optimizer",
        }.items()
    },
    "attention": "no attention",
    "body": "no hidden layer",
    "adapters": "no adapters",
    "batch norm": "no batch norm",
    "scores": "no class scores",
}
"""What a cell says for what is missing."""


def test_every_word_of_the_table_is_a_need() -> None:
    not_needs = {"adapters", "attention", "batch norm", "scores"}
    not_of_the_model = {"one_model", "one_client", "public", "probability", "whole_batches"}
    of_a_setting = {"no_decay", "linear_steps", "unweighted"}  # which no file of configs/method/ has
    assert MISSING.keys() - not_needs == NEEDS.keys() - not_of_the_model - of_a_setting


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS, ids=lambda path: path.stem)
def test_each_model_trains_or_is_refused_in_one_line_as_the_docs_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], method: Path
) -> None:
    shutil.copy(ROOT / "tests" / "strangers.py", tmp_path / "strangers_in_cwd.py")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.delitem(sys.modules, "strangers_in_cwd", raising=False)
    row = [cell(method, column, capsys) for column in COLUMNS]
    if os.environ.get(WRITE):
        write(table() | {method.stem: row})
    assert table()[method.stem] == row


def cell(method: Path, column: str, capsys: pytest.CaptureFixture[str]) -> str:
    """``yes`` where two rounds were trained, else what is missing."""
    small = {key: value for key, value in SMALL.items() if column != POSES or not key.startswith("data.")}
    words = [word for key, value in small.items() for word in (f"--{key}", value)]
    options = OWN.get((method.stem, column), COLUMNS[column])
    folder = f"{method.stem}_{list(COLUMNS).index(column)}"
    files = ["-c", str(CONFIGS / "quickstart.yaml"), "-c", str(method)]
    status = exit_status(["fit", *files, *options, *words, "--trainer.default_root_dir", folder])
    if status:
        assert status == 2
        return missing(method, column, capsys.readouterr().err)
    assert len(rows(Path(folder) / "lightning_logs" / "version_0" / "metrics.csv")) == 2
    return "yes"


def exit_status(words: list[str]) -> Any:
    try:
        main(words)
    except SystemExit as stopped:
        return stopped.code
    return 0


def missing(method: Path, column: str, err: str) -> str:
    """What a refusal names: one line, before any training, that says which need of whom is not met."""
    where = f"{method.stem} on {column}"
    assert re.fullmatch(r"lit-fed: error: .+\n", err), f"{where}: {err}"
    found = [need for need, text in NEEDS.items() if text in err]
    found += [word for word in ("attention", "adapters", "batch norm") if f"needs {word}" in err]
    found += ["scores"] if "mixes class scores" in err else []
    assert len(found) == 1, f"{where}: {err}"
    assert re.search(r"\b(algorithm|model) \w+", err), f"{where}: {err}"
    return MISSING[found[0]]


# ---------------------------------------------------------------------- the table in the docs


def table() -> dict[str, list[str]]:
    """The cells by method."""
    text = DOCS.read_text(encoding="utf-8")
    lines = text.partition(BEGIN)[2].partition(END)[0].splitlines()
    split = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    return {cells[0].strip("`"): cells[1:] for cells in split}


def write(found: dict[str, list[str]]) -> None:
    """Put the table where it belongs."""
    before, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
    lines = ["| file | " + " | ".join(COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS)]
    lines += [f"| `{name}` | " + " | ".join(found[name]) + " |" for name in sorted(found)]
    DOCS.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + rest.partition(END)[2], encoding="utf-8")


def test_the_docs_have_a_row_for_every_method_and_a_column_for_every_model() -> None:
    text = DOCS.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    assert text.startswith("| file | " + " | ".join(COLUMNS) + " |\n")
    assert table().keys() == {path.stem for path in METHODS}
    assert all(len(row) == len(COLUMNS) for row in table().values())
