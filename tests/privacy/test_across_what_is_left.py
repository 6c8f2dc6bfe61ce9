"""An audit of every byte that a private run leaves: checkpoint, export, cards, folder, TensorBoard, terminal.

The clients' updates are zero whatever their data are, so that the released models tell nothing. What differs all the
same between two populations, or between two keys, which draw other cohorts, goes past the mechanism.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn

from lit_fed.engine.loop.run import RoundRecord
from lit_fed.handover.export import export_network
from lit_fed.methods import Scaffold
from lit_fed.participation import PoissonParticipation
from lit_fed.privacy import ClientLevel
from tests.support import LeastSquares, Points, fit, rows

pytest.importorskip("dp_accounting")

KEYS = ("5a" * 32, "a5" * 32)
NAMED = {"run/checkpoints/clients"}
"""What `docs/privacy.md` names as not private; times are left out below."""
LEFT = {
    "export/MODEL_CARD.md", "export/model.json", "export/model.pt2", "export/model.safetensors", "run/.lock",
    "run/checkpoints/best.ckpt", "run/checkpoints/last.ckpt", "run/clients.csv", "run/metrics.csv", "run/privacy.md",
    "run/tensorboard", "terminal",
}  # fmt: skip
"""All that is left, beside that."""
FIELDS = {
    "apart", "base", "callbacks", "config", "executor", "hyper_parameters",
    "initial", "inputs", "lit_fed_format", "method", "metrics", "models",
    "monitor", "pytorch-lightning_version", "round_idx", "seed", "server", "state_dict", "tasks",
}  # fmt: skip
"""Entries of a checkpoint: released models, settings, names of public weights, metrics of the models on public data."""


class Surveyed(Points):
    """Six clients with rows of their own, and test rows of nobody's."""

    def __init__(self, size: int, value: float) -> None:
        super().__init__(6, val_fraction=0.2)
        self.size, self.value = size, value

    def load_arrays(self) -> Any:
        clients = np.repeat(np.arange(6), [self.size, 4, 9, 5, 6, 7])
        x = np.random.default_rng(3).random((len(clients), 2), np.float32)
        x[: self.size] = self.value
        arrays = super().load_arrays()
        return type(arrays)(x, clients % 5, arrays.test.x[:2], arrays.test.y[:2], clients, None, "surveyed")


class Still(LeastSquares):
    """A model whose gradient is zero, and which tells of its data by all that it logs."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train/loss", loss)
        return 0 * loss


def left(root: Path, key: str, size: int, value: float, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """All that a run leaves, by name."""
    root.mkdir()
    (root / "run.key").touch(0o600)
    (root / "run.key").write_text(f'{{"key": "{key}"}}\n')
    capsys.readouterr()
    made = fit(
        root, Still(), Surveyed(size, value), Scaffold(weighting="uniform"), max_rounds=3, logger=True,
        privacy=ClientLevel(0.5, 0.0, delta=0.01, key_file=str(root / "run.key")),
        participation=PoissonParticipation(0.5), on_client_failure="skip",
    )  # fmt: skip
    network = nn.Linear(2, 1, bias=False)
    export_network(made.log_dir, root / "export", network, stored=((2,), "float32"), onnx=False)
    said = capsys.readouterr()
    found: dict[str, Any] = {"terminal": _without_times((said.out + said.err).replace(str(root), ""))}
    for top, folder in (("run", made.log_dir), ("export", root / "export")):
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = f"{top}/{path.relative_to(folder)}"
            if "tfevents" in name:
                events = EventAccumulator(str(path.parent)).Reload()
                tags = events.Tags()
                values = {tag: [one.value for one in events.Scalars(tag)] for tag in tags["scalars"]}
                found["run/tensorboard"] = {"tags": tags, **{t: v for t, v in values.items() if "time" not in t}}
            elif name.endswith(".ckpt"):
                found[name] = torch.load(path, weights_only=True)
                found[name]["metrics"] = {k: v for k, v in found[name]["metrics"].items() if "time" not in k}
            elif name.endswith("metrics.csv"):
                found[name] = _columns(path)
            elif name.endswith(".safetensors") and top == "export":  # its header has no fixed order
                with safe_open(path, "pt") as file:
                    found[name] = {"metadata": file.metadata(), **{key: file.get_tensor(key) for key in file.keys()}}  # noqa: SIM118
            else:
                found[name] = path.read_bytes()
    return found


def _columns(path: Path) -> list[dict[str, str]]:
    return [{name: value for name, value in row.items() if "time" not in name} for row in rows(path)]


def _without_times(text: str) -> str:
    return re.sub(r"[0-9.]+ (s|ms|it/s)\b", "", text)


def differences(one: Any, other: Any, name: str = "") -> set[str]:
    """Names of the entries that differ."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return {
            odd
            for key in one.keys() | other.keys()
            for odd in differences(one.get(key), other.get(key), f"{name}/{key}" if name else str(key))
        }
    equal = torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else one == other
    return set() if equal or any(name.startswith(one) for one in NAMED) else {name}


def leaks(root: Path, capsys: pytest.CaptureFixture[str]) -> set[str]:
    """What differs between populations that differ in client 0, or between keys."""
    first = left(root / "first", KEYS[0], 8, 1.0, capsys)
    others = [(KEYS[0], 8, 2.0), (KEYS[0], 9, 1.0), (KEYS[1], 8, 1.0)]
    made = [left(root / str(place), *other, capsys) for place, other in enumerate(others)]
    return {odd for other in made for odd in differences(first, other)}


SEALED = {
    f"run/checkpoints/{name}.ckpt/{entry}"
    for name in ("last", "best")
    for entry in ("apart", "server/around.privacy/_key")
}
"""Digests keyed by the run's key, which tell nothing to those who do not have it."""


def test_nothing_but_released_models_settings_and_public_data_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert leaks(tmp_path, capsys) == SEALED


def _in_the_checkpoint(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(ClientLevel, "seal", lambda self, content: None)
    return "run/checkpoints/last.ckpt/clients"


def _of_the_cohort(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(RoundRecord, "withheld", lambda self, evaluated_on: self)
    return "run/metrics.csv"


def _in_the_exports_card(patch: pytest.MonkeyPatch) -> str:
    _in_the_checkpoint(patch)
    return "export/MODEL_CARD.md"


def _in_the_folder(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(ClientLevel, "withhold", property(lambda self: False, lambda self, value: None), raising=False)
    return "run/partition.json"


@pytest.mark.parametrize("plant", [_in_the_checkpoint, _of_the_cohort, _in_the_exports_card, _in_the_folder])
def test_the_audit_finds_a_planted_leak(
    plant: Callable[[pytest.MonkeyPatch], str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    where = plant(monkeypatch)
    assert where in leaks(tmp_path, capsys)


def test_all_that_is_left_is_on_the_list(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = left(tmp_path / "run", KEYS[0], 8, 1.0, capsys)
    assert {name for name in found if not any(name.startswith(one) for one in NAMED)} == LEFT
    assert found["run/checkpoints/last.ckpt"].keys() == FIELDS
