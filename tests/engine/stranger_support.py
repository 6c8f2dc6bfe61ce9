"""What the tests of strangers' modules share: a user's folder, the command line, small runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lit_fed.data import Digits
from lit_fed.participation import Participation
from tests import strangers
from tests.support import ROOT

CONFIGS = ROOT / "configs"
SMALL = {
    "trainer.local_epochs": "1",
    "trainer.participation.init_args.count": "2",
    "trainer.enable_progress_bar": "false",
    "trainer.logger": "false",
    "data.init_args.num_clients": "4",
    "data.init_args.seed": "0",  # no client has a last batch of one
    "data.init_args.batch_size": "16",
}
DIGITS = {"data.init_args.max_train_samples": "240", "data.init_args.partition.init_args.alpha": "1.0"}


def run(module: str, *options: str, rounds: int = 2, folder: str = "run") -> Path:
    """`fit -c configs/quickstart.yaml --model strangers_in_cwd.<module> …`; returns the run's folder."""
    from lit_fed.command.cli import main

    settings = SMALL | ({} if module == "RegressionNet" else DIGITS) | {"trainer.max_rounds": str(rounds)}
    words = [word for key, value in settings.items() for word in (f"--{key}", value)]
    data = ["-c", str(CONFIGS / "data" / "diabetes.yaml")] if module == "RegressionNet" else []
    model = ["--model", f"strangers_in_cwd.{module}"]
    files = ["-c", str(CONFIGS / "quickstart.yaml"), *model, *data]
    main(["fit", *files, *words, "--trainer.default_root_dir", folder, *options])
    return Path(folder) / "lightning_logs" / "version_0"


def method(name: str) -> list[str]:
    return ["-c", str(CONFIGS / "method" / f"{name}.yaml")]


class Backwards(Participation):
    """Everybody, last client first."""

    @property
    def nominal_cohort_size(self) -> int:
        return self.num_clients

    def select(self, round_idx: int) -> list[int]:
        return [*range(self.num_clients)][::-1]

    def draw(self, round_idx: int) -> Any:
        raise AssertionError("select is its own")


STRANGERS = [
    strangers.Net,
    strangers.DictNet,
    strangers.Curious,
    strangers.Meddler,
    strangers.LatentGAN,
    strangers.Fixed,
]


def digits() -> Digits:
    return Digits(num_clients=3, max_train_samples=90, batch_size=20)
