"""How far pseudo-samples are from the real classes, against arithmetic and in runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg, FedGen, HFedCKD, PseudoMap, PseudoTest
from lit_fed.methods.data_free.display import map_picture
from lit_fed.methods.data_free.realism import class_divergences
from tests.methods.data_free.support import Halves, three_widths
from tests.support import Points, assert_same, events_of, fit, weights

SMALL: dict[str, Any] = {"noise_size": 3, "hidden": 4, "generator_steps": 2, "generator_batch_size": 6}


def test_divergences_by_hand() -> None:
    # Real: class 0 at (0, 0) and (2, 0), class 1 at (4, 0) twice; variance about 2.5: (2.5² + 0.5² + 2·1.5²)/4 = 2.75.
    # Pseudo: class 0 at (1, 3) twice: means 3² apart, deviations 1 and 0: (9 + 1)/2.75; class 1 as it is: 0.
    real, labels = torch.tensor([[0.0, 0], [2, 0], [4, 0], [4, 0]]), torch.tensor([0, 0, 1, 1])
    made, wanted = torch.tensor([[1.0, 3], [1, 3], [4, 0]]), torch.tensor([0, 0, 1])
    found = class_divergences(made, wanted, real, labels, num_classes=3)  # of class 2 there is nothing
    assert found.tolist() == pytest.approx([10 / 2.75, 0.0])
    assert class_divergences(real, labels, real, labels, 2).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("kinds", [False, True])
def test_what_is_reported_and_that_it_changes_nothing(kinds: bool, tmp_path: Path) -> None:
    def run(name: str, **more: Any) -> Any:
        torch.manual_seed(0)
        tasks: Any = three_widths() if kinds else Halves()
        return fit(tmp_path / name, tasks, Points(num_clients=3), FedGen(**SMALL), max_rounds=2, **more)

    tested, plain = run("tested", protocols=[PseudoTest()]), run("plain")
    names = {name for name in tested.metrics if name.startswith("pseudo")}
    ends = ("_full", "_half", "_quarter") if kinds else ("",)
    assert names == {f"pseudo{end}/{metric}" for end in ends for metric in ("divergence", "acc")}
    for end in ends:
        assert tested.metrics[f"pseudo{end}/divergence"] > 0
        assert 0 <= tested.metrics[f"pseudo{end}/acc"] <= 1
    if not kinds:
        assert_same(weights(tested), weights(plain))


def test_features_of_images_are_what_the_classifier_sees(tmp_path: Path) -> None:
    from lit_fed.data import Digits
    from lit_fed.tasks import Classifier

    torch.manual_seed(0)
    task = Classifier("small_cnn", lambda p: torch.optim.SGD(p, lr=0.1), num_classes=10, input_shape=(1, 8, 8))
    method = HFedCKD(generator_steps=1, distillation_steps=1, pseudo_size=8, width=4)
    data = Digits(num_clients=2, max_train_samples=100)
    extras: dict[str, Any] = {"protocols": [PseudoTest(4)], "callbacks": [PseudoMap(5)], "logger": True}
    made = fit(tmp_path, task, data, method, max_rounds=1, **extras)
    assert made.metrics["pseudo/divergence"] > 0
    assert 0 <= made.metrics["pseudo/acc"] <= 1
    folder = tmp_path / "lightning_logs" / "version_0"
    with Image.open(folder / "pseudo_map.png") as picture:
        assert min(picture.size) > 100
    assert "pictures/pseudo_map" in EventAccumulator(events_of(folder)).Reload().Tags()["images"], "a study shows it"


def test_a_map_has_dots_and_crosses() -> None:
    places = np.arange(12, dtype=np.float32).reshape(6, 2)
    figure = map_picture(places, np.array([0, 1, 2, 0, 1, 2]), num_real=4)
    real, pseudo = figure.axes[0].collections
    assert (len(real.get_offsets()), len(pseudo.get_offsets())) == (4, 2)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    for made, name in ((PseudoTest, "PseudoTest"), (PseudoMap, "PseudoMap")):
        with pytest.raises(ConfigError, match=rf"{name}\.samples_per_class is 1; it must be at least 2"):
            made(1)
    with pytest.raises(
        ConfigError, match=r"protocol PseudoTest needs a method with a generator, .*; algorithm is FedAvg"
    ):
        fit(tmp_path, Halves(), Points(), FedAvg(), max_rounds=1, protocols=[PseudoTest()])
    with pytest.raises(ConfigError, match="callback PseudoMap needs a method with a generator"):
        fit(tmp_path, Halves(), Points(), FedAvg(), max_rounds=1, callbacks=[PseudoMap()])
