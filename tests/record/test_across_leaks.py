"""A client's samples reach no bit of the run that forgets it: two runs that differ in them alone end in the same files.

Each way by which they could is planted: what stops it is taken away, and the two runs differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_fed.command.cli import main
from lit_fed.data.partitions.cut import Cut
from lit_fed.participation import Participation
from lit_fed.record.commands import forget
from tests.record.commands.test_forget import folder_of, forgotten, rounds_of, same, state_of

Undo = Callable[[pytest.MonkeyPatch], Any]
RUN = {
    "data": "Table",
    "data.target": "ill",
    "data.client": "site",
    "data.features": "[age, dose]",
    "data.mean": "[50.0, 1.0]",
    "data.std": "[10.0, 1.0]",
    "data.class_names": "['no', 'yes']",
    "data.batch_size": "4",
    "model": "Classifier",
    "model.network": "mlp",
    "algorithm": "FedAvg",
    "trainer.max_rounds": "6",
    "trainer.local_epochs": "2",
    "trainer.protocols": "[GlobalTest]",
    "trainer.record": "true",
    "trainer.logger": "false",
    "trainer.enable_progress_bar": "false",
}
SLOW: dict[str, str | None] = {
    "trainer.participation": "Asynchronous",
    "trainer.participation.concurrency": "2",
    "trainer.participation.buffer": "1",
    "trainer.participation.speeds.seconds_per_sample": "0.1",
}


def stopping(monitor: str) -> dict[str, str | None]:
    return {"trainer.callbacks": f"[{{class_path: EarlyStopping, init_args: {{patience: 1, monitor: {monitor}}}}}]"}


def table(path: Path, variant: int) -> Path:
    """Four sites; the rows of the last one, which is forgotten, follow from the variant, and so does their number."""
    lines = ["site,age,dose,ill"]
    for place, site in enumerate("abcd"):
        other = variant if site == "d" else 0
        generator = np.random.default_rng(10 * place + other)
        for _ in range(24 + 100 * (other == 1)):
            age, dose = generator.normal(50 + 3 * place + 30 * other, 10), generator.random() * 2
            ill = "maybe" if other == 2 else "no" if (age > 55) == bool(other) else "yes"
            lines.append(f"{site},{age:.3f},{dose:.3f},{ill}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def trained(root: Path, variant: int, more: dict[str, str | None]) -> Path:
    root.mkdir()
    options = RUN | {"data.path": str(table(root / "rows.csv", variant)), "trainer.default_root_dir": str(root)} | more
    main(["fit", *(word for key, value in options.items() if value is not None for word in (f"--{key}", value))])
    return folder_of(root)


def outcome(run: Path) -> dict[str, Any]:
    """All that is left of a run but hashes of its data: models, states, choices and metrics."""
    best = torch.load(run / "checkpoints" / "best.ckpt", weights_only=True)
    last = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    callbacks = {name: state for name, state in last["callbacks"].items() if name != "Record"}
    return {**state_of(run), "best": best["server"], "callbacks": callbacks, "rounds": rounds_of(run)}


def no_removal(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cut, "without", lambda cut, absent, own_test: cut)


def asked(patch: pytest.MonkeyPatch) -> None:
    """The absent client is asked for metrics on its own samples."""
    no_removal(patch)
    patch.setattr(Participation, "seen_clients", property(lambda self: np.arange(self.num_clients)))


IN: dict[str, tuple[dict[str, str | None], str, Undo]] = {
    "validation": ({"data.val_fraction": "0.3", **stopping("val/global/loss")}, "callbacks", no_removal),
    "best": ({}, "callbacks", no_removal),
    "schedule": (SLOW, "server", no_removal),
    "early stopping": (stopping("global/loss"), "callbacks", no_removal),
    "own test": ({"trainer.protocols": "[ClientTest]", **stopping("clients/loss_mean")}, "callbacks", asked),
    "cohorts": (
        {"trainer.participation": "WeightedParticipation", "trainer.participation.count": "2"}, "server", no_removal
    ),
    "weights of clients": ({"algorithm": "AFL", "algorithm.weighting": "samples"}, "server", no_removal),
    "weights of classes": ({"model.class_weights": "balanced"}, "server", no_removal),
}  # fmt: skip
"""Ways that are closed: settings, what they would change, and what opens them again."""
DAY = ("validation", "best", "schedule", "scale", "class names")


def by_day(ways: Iterable[str]) -> list[Any]:
    return [way if way in DAY else pytest.param(way, marks=pytest.mark.long) for way in ways]


@pytest.mark.parametrize("way", by_day(IN))
def test_no_sample_of_a_forgotten_client_is_left(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, changes, undo = IN[way]
    runs = [trained(tmp_path / f"{variant}", variant, settings) for variant in (0, 1)]
    for run in runs:
        status, told = forgotten(capsys, run, "--client", "d")
        assert status == 0, told
    one, other = (outcome(folder_of(run.parents[1], 1)) for run in runs)
    assert same(one, other)
    undo(monkeypatch)
    for run in runs:
        assert forgotten(capsys, run, "--client", "d")[0] == 0
    one, other = (outcome(folder_of(run.parents[1], 2)) for run in runs)
    assert not same(one[changes], other[changes])


REFUSED: dict[str, tuple[dict[str, str | None], int, str]] = {
    "scale": ({"data.mean": None, "data.std": None}, 1, "data.standardise takes mean and deviation over all clients'"),
    "class names": ({"data.class_names": None}, 2, "data.class_names are read off all clients' rows"),
    "features": ({"data.features": None}, 1, "data.features are checked for identifiers in all clients' rows"),
    "choice of samples": ({"data.max_train_samples": "60"}, 1, "data.max_train_samples"),
    "clock": ({"trainer.max_time": "00:01:00:00"}, 1, "trainer.max_time ends a run by the clock"),
}
"""Ways that are refused: settings, a variant that they let pass, and the line."""


@pytest.mark.parametrize("way", by_day(REFUSED))
def test_what_cannot_be_forgotten_exactly_is_refused_by_name(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings, variant, line = REFUSED[way]
    runs = [trained(tmp_path / f"{one}", one, settings) for one in (0, variant)]
    for run in runs:
        status, told = forgotten(capsys, run, "--client", "d")
        assert status == 2
        assert line in told.splitlines()[-1]
        assert not folder_of(run.parents[1], 1).exists()
    if way not in ("clock", "features"):  # of which the two runs' data make no difference
        monkeypatch.setattr(forget, "obstacle", lambda run, settings: None)
        for run in runs:
            assert forgotten(capsys, run, "--client", "d")[0] == 0
        one, other = (outcome(folder_of(run.parents[1], 1)) for run in runs)
        assert not same(one, other)


def test_other_data_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path / "run", 0, {"trainer.max_rounds": "1"})
    table(tmp_path / "run" / "rows.csv", 1)
    status, told = forgotten(capsys, run, "--client", "d")
    assert status == 2
    assert f"the data are not those of {run}, by the hashes of its record; restore them" in told


def test_names_are_those_of_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path / "run", 0, {"trainer.max_rounds": "1"})
    assert "there is no client named 'e'; clients are a, b, c, d" in forgotten(capsys, run, "--client", "e")[1]
    assert (
        "forget      d, b: the first round that depends on it is 0" in forgotten(capsys, run, "--client", "[d, b]")[1]
    )
