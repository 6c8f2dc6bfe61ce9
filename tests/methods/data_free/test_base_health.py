"""Warnings of a generator that collapses, or whose loss explodes: named, and once."""

from __future__ import annotations

import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed.command.cli import main
from lit_fed.methods import FedGen, HFedCKD
from lit_fed.methods.data_free.base import GeneratorCollapse, GeneratorExplosion, class_variances
from tests.methods.data_free.run_kinds import CONFIGS
from tests.methods.data_free.support import Halves
from tests.support import Points, fit, rows

SMALL: dict[str, Any] = {"noise_size": 3, "generator_steps": 2, "generator_batch_size": 6}
METHODS = {
    "fedgen": (FedGen, SMALL | {"hidden": 4}),
    "hfedckd": (HFedCKD, SMALL | {"generator": "features", "width": 4, "pseudo_size": 8, "distillation_steps": 0}),
}
EACH = pytest.mark.parametrize("method", METHODS)


def warned(folder: Path, method: str, rounds: int, **settings: Any) -> list[warnings.WarningMessage]:
    """What a run warns of."""
    make, small = METHODS[method]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit(folder, Halves(), Points(), make(**small | settings), max_rounds=rounds)
    return [one for one in found if issubclass(one.category, GeneratorCollapse | GeneratorExplosion)]


def test_variances_by_hand() -> None:
    # Class 0: (1, 1) and (3, 1): variances 1 and 0, mean ½. Class 1: twice (0, 2): 0.
    # Mean square of all eight values: (1 + 1 + 9 + 1 + 0 + 4 + 0 + 4)/8 = 2.5. So ½/2.5 = 0.2 and 0.
    samples = torch.tensor([[[1.0, 1.0], [3.0, 1.0]], [[0.0, 2.0], [0.0, 2.0]]])
    assert class_variances(samples).tolist() == pytest.approx([0.2, 0.0])
    assert class_variances(1000 * samples).tolist() == pytest.approx([0.2, 0.0])  # whatever the scale
    assert class_variances(torch.zeros(2, 3, 4)).tolist() == [0.0, 0.0]


@EACH
def test_a_generator_that_makes_one_sample_a_class_is_told_of_once(method: str, tmp_path: Path) -> None:
    # Noise of no effect: the columns of the first layer that read it are 0 and stay so without steps along them.
    make, small = METHODS[method]

    class Deaf(make):  # type: ignore[misc, valid-type]  # either method
        def make_generator(self) -> Any:
            network = super().make_generator()
            network.body[0].weight.data[:, :3] = 0
            return network

    still = {"generator_optimizer": lambda p: torch.optim.SGD(p, lr=0.0)}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit(tmp_path, Halves(), Points(), Deaf(**small | still), max_rounds=3)
    own = [one for one in found if one.category is GeneratorCollapse]
    assert len(own) == 1
    assert str(own[0].message).startswith(
        "GeneratorCollapse: round 0: the generator's samples of class 2 hardly differ, their relative variance is "
    )
    reported = rows(tmp_path / "lightning_logs" / "version_0" / "metrics.csv")
    assert all(float(row["server/generator_variance"]) < 1e-9 for row in reported)


@EACH
def test_a_loss_that_explodes_is_told_of_once(method: str, tmp_path: Path) -> None:
    # Any cross-entropy is above 0.
    (told,) = warned(tmp_path, method, 3, explosion_above=0.0)
    assert told.category is GeneratorExplosion
    assert str(told.message).startswith("GeneratorExplosion: round 0: the generator's cross-entropy is ")
    assert "(algorithm.explosion_above is 0), so the clients' training diverges; lower the learning" in str(
        told.message
    )


@EACH
def test_a_healthy_generator_is_not_told_of(method: str, tmp_path: Path) -> None:
    assert warned(tmp_path, method, 2) == []


def test_a_resumed_run_does_not_warn_again(tmp_path: Path) -> None:
    make, small = METHODS["fedgen"]
    with warnings.catch_warnings(record=True) as first:
        warnings.simplefilter("always")
        fit(tmp_path, Halves(), Points(), make(**small, explosion_above=0.0), max_rounds=1)
    with warnings.catch_warnings(record=True) as then:
        warnings.simplefilter("always")
        fit(tmp_path, Halves(), Points(), make(**small, explosion_above=0.0), max_rounds=2, ckpt_path="last")
    assert [sum(one.category is GeneratorExplosion for one in found) for found in (first, then)] == [1, 0]


def test_the_published_weights_at_ten_times_the_published_rate_are_told_of(tmp_path: Path) -> None:
    # α = β = 10 are published beside a learning rate of 0.01; this run has 0.1, and a generator without weight decay.
    options = {
        "trainer.max_rounds": "4", "trainer.evaluate_every": "0", "trainer.logger": "false",
        "trainer.enable_progress_bar": "false", "trainer.default_root_dir": str(tmp_path),
        "algorithm.init_args.alpha": "10", "algorithm.init_args.beta": "10",
        "algorithm.init_args.generator_optimizer": "{class_path: torch.optim.Adam, init_args: {lr: 0.001}}",
    }  # fmt: skip
    run = CONFIGS / "papers" / "hfedckd" / "runs" / "digits_three_widths.yaml"
    files = ["-c", str(run), "-c", str(CONFIGS / "method" / "fedgen.yaml")]
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with suppress(SystemExit):  # on some machines a client's loss is no longer finite in the third round
            main(["fit", *files, *(word for key, value in options.items() for word in (f"--{key}", value))])
    assert [one.category for one in found if issubclass(one.category, GeneratorExplosion)] == [GeneratorExplosion]
