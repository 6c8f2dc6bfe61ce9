"""What a run will send is foreseen to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from typing_extensions import override

from lit_fed import FederatedTrainer
from lit_fed.codecs import CastCodec, TopK
from lit_fed.command.cli import main
from lit_fed.command.commands.cost import foresee, report
from lit_fed.data import Digits
from lit_fed.engine.storage.packs import clients_of, read_pack
from lit_fed.errors import ConfigError
from lit_fed.methods import Ditto, FedAvg
from tests.support import ROOT, LeastSquares, Points, assert_same, fit, rows, trainer

CONFIGS = ROOT / "configs"
SMALL = ["--trainer.max_rounds=4", "--trainer.local_epochs=null", "--trainer.local_steps=1", "--trainer.logger=false"]
PARTS = {
    "fedfrozen": ["-c", str(CONFIGS / "network/vit_pocket.yaml")],
    "fd_avg": ["--algorithm.init_args.public_size=100"],
    "fedmd": ["--algorithm.init_args.public_size=100"],
    "feddf": ["--algorithm.init_args.public_size=100"],
}


@pytest.mark.parametrize(
    "method",
    ["fedavg", "fedprox", "scaffold", "ditto", "fedfrozen", "fedper", "local_only", "fd_avg", "fedmd", "feddf"],
)
def test_a_runs_bytes_are_those_foreseen(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = ["-c", str(CONFIGS / "quickstart.yaml"), "-c", str(CONFIGS / "method" / f"{method}.yaml")]
    args = [*files, *PARTS.get(method, []), *SMALL, f"--trainer.default_root_dir={tmp_path}"]
    main(["fit", *args, "--trainer.enable_progress_bar=false"])
    run = tmp_path / "lightning_logs" / "version_0"
    capsys.readouterr()
    main(["cost", "-c", str(run / "config.yaml")])
    table = {}
    for line in capsys.readouterr().out.splitlines()[2:]:
        if not line[0].isdigit():
            continue
        span, *numbers = line.split()
        first, _, last = span.partition("–")
        for round_idx in range(int(first), int(last or first) + 1):
            table[round_idx] = [int(number.replace(",", "")) for number in numbers[-2:]]
    measured = [
        [float(row["comm/downlink_bytes"]), float(row["comm/uplink_bytes"])] for row in rows(run / "metrics.csv")
    ]
    assert [table[round_idx] for round_idx in range(4)] == measured


def test_codecs_and_cohorts_count() -> None:
    # Two float32 from the model of two weights: 8 bytes down, 4 up in bfloat16, to and from two clients.
    made = trainer(Path(), max_rounds=3, uplink_codec=CastCodec("bfloat16"))
    cost = foresee(made, LeastSquares(), Points(), FedAvg())
    assert [(one["model"].downlink, one["model"].uplink) for one in cost.rounds] == [(16, 8)] * 3
    assert (cost.total, cost.ratio, cost.frozen) == (72, 1.0, 0)
    assert cost.parameters == {"model": 2}


def test_a_frozen_head_saves_what_fedavg_would_send() -> None:
    # mlp: 64·64 + 64 = 4160 in the body; the head's classes 64·10, without a bias, stay where they are.
    from lit_fed import Classifier
    from lit_fed.methods import DotRegression

    def ratio(model: Classifier) -> float:
        return foresee(trainer(Path()), model, Digits(num_clients=4), DotRegression()).ratio

    model = Classifier(network="mlp", input_shape=(1, 8, 8))
    assert ratio(model) == pytest.approx(4160 / 4800)
    # A layer that the task itself holds still would not travel under FedAvg either.
    model = Classifier(network="mlp", network_args={"hidden": [64, 64]}, input_shape=(1, 8, 8))
    model.network.get_submodule("body.1").requires_grad_(False)
    assert ratio(model) == pytest.approx(4160 / 4800)


def test_densities_are_foreseen_for_all_classes() -> None:
    from lit_fed import Classifier
    from lit_fed.methods import UWA

    # 100 public samples × 10 classes, and mean and variance of 10 logits for each of 10 classes: 4·(1000 + 200) bytes.
    method = UWA(public_size=100, calibration_fraction=0.2)
    model = Classifier(network="mlp", input_shape=(1, 8, 8))
    cost = foresee(trainer(Path(), max_rounds=2), model, Digits(num_clients=4), method)
    assert [(one["model"].down, one["model"].up) for one in cost.rounds] == [(0, 4800), (4000, 4800)]


def test_kinds_of_networks_are_counted_apart(capsys: pytest.CaptureFixture[str]) -> None:
    kinds = {"small": {"network_args": {"hidden": [4]}, "clients": [0]}, "big": {"clients": [1, 2, 3]}}
    from lit_fed import Classifier
    from lit_fed.methods import FederatedDistillation

    models = {name: Classifier("mlp", input_shape=(1, 8, 8), **own) for name, own in (("small", {}), ("big", {}))}
    made: FederatedTrainer = trainer(Path(), max_rounds=1, kinds=kinds)
    cost = foresee(made, models, Digits(num_clients=4), FederatedDistillation(public_size=100))
    assert {kind: one.downloads for kind, one in cost.rounds[0].items()} == {"small": 1, "big": 3}


def test_pretrained_weights_are_not_fetched(capsys: pytest.CaptureFixture[str]) -> None:
    main(["cost", "-c", str(CONFIGS / "papers" / "uwa" / "runs" / "suwa_cifar100.yaml")])
    out, err = capsys.readouterr()
    assert err == ""
    assert f"{5000 * 100 * 4:,}" in out  # down, a round


@pytest.mark.parametrize("kinds", [[], ["--trainer.kinds", "{a: {}, b: {weights: b.bin}}"]])
def test_weights_to_start_from_are_not_read(kinds: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run = ["cost", "-c", str(CONFIGS / "quickstart.yaml"), "--algorithm=FLoRA", *kinds]
    run += ["--model.network=mlp", "--model.adapter.rank=4"]
    main(run)
    expected = capsys.readouterr().out
    main([*run, "--model.weights=nowhere.safetensors", "--model.weights_of=backbone"])
    assert capsys.readouterr() == (expected, "")


def test_weights_that_a_model_of_ones_own_cannot_do_without_are_handed_to_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_weights.py").write_text(
        "from tests.support import LeastSquares\n\n\n"
        "class Needs(LeastSquares):\n"
        "    def __init__(self, weights: str) -> None:\n"
        "        super().__init__()\n"
        "        assert weights == 'mine'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    main(["cost", "-c", str(CONFIGS / "quickstart.yaml"), "--model=own_weights.Needs", "--model.weights=mine"])
    assert "parameters 2\n" in capsys.readouterr().out


def test_more_rounds_than_can_be_looked_at_are_refused(tmp_path: Path) -> None:
    made = trainer(tmp_path, max_rounds=10**12)
    told = r"trainer\.max_rounds is 1000000000000; it must be at most 1000000, as each is looked at"
    with pytest.raises(ConfigError, match=told):
        foresee(made, LeastSquares(), Points(), FedAvg())


def test_the_bytes_do_not_depend_on_the_batches(tmp_path: Path) -> None:
    # Two rounds of two clients, down and up: 2 · 2 · 2 float32 = 8 bytes each.
    made = trainer(tmp_path, limit_train_batches=1)
    assert foresee(made, LeastSquares(), Points(), FedAvg()).total == 2 * 2 * 2 * 8
    # A trial has as many rounds as it says.
    assert foresee(trainer(tmp_path, fast_dev_run=3), LeastSquares(), Points(), FedAvg()).total == 3 * 2 * 2 * 8


def test_data_whose_setup_reads_values_are_set_up_where_values_are(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    """As Lightning's pages show it; the meta device has no values for `random_split`."""
    (tmp_path / "halves.py").write_text(
        "import torch\n"
        "from lightning import LightningDataModule\n"
        "from torch.utils.data import DataLoader, TensorDataset, random_split\n"
        "class Halves(LightningDataModule):\n"
        "    def setup(self, stage):\n"
        "        data = TensorDataset(torch.randn(40, 3), torch.arange(40) % 2)\n"
        "        self.parts = random_split(data, [30, 10])\n"
        "    def train_dataloader(self):\n"
        "        return DataLoader(self.parts[0], 10, shuffle=True)\n"
        "    def test_dataloader(self):\n"
        "        return DataLoader(self.parts[1], 10)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    run = ["--data=halves.Halves", "--data.num_clients=2", "--model=Classifier", "--model.network=logistic"]
    main(["cost", *run, "--algorithm=FedAvg", "--trainer.max_rounds=3"])
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines()[0] == f"parameters {3 * 2 + 2}"


class Optimized(LeastSquares):
    """A model with an optimizer of its own choice, which may ask the trainer for the run's length."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    @override
    def configure_optimizers(self) -> Any:
        trained = [one for one in self.parameters() if one.requires_grad]
        if self.kind == "adam":
            return torch.optim.Adam(trained, lr=0.1, weight_decay=0.1)
        if self.kind == "plain":
            return torch.optim.SGD(trained, lr=0.1)
        made = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        assert self.trainer.max_epochs
        return [made], [torch.optim.lr_scheduler.StepLR(made, self.trainer.max_epochs)]


# Two weights in float32: 8 bytes of momentum, or twice 8 of Adam's moments and 4 of its number of steps; 8 of an error
# or of an estimate, with 8 of the number of updates that EF21's is made of, at both ends. Ditto has two phases.
@pytest.mark.parametrize(
    ("kind", "method", "codec", "expected"),
    [
        ("momentum", FedAvg, None, (8, 0, 0)),
        ("adam", FedAvg, TopK(0.5), (20, 8, 0)),
        ("plain", FedAvg, TopK(0.5, feedback="ef21"), (0, 16, 16)),
        ("adam", Ditto, None, (40, 0, 0)),
    ],
)
def test_the_disk_of_optimizers_and_codecs_is_that_of_a_run(
    tmp_path: Path, kind: str, method: Any, codec: Any, expected: tuple[int, int, int]
) -> None:
    settings: dict[str, Any] = {"max_rounds": 1, "client_optimizer": "kept", "uplink_codec": codec}
    model = Optimized(kind)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    cost = foresee(trainer(tmp_path, **settings), model, Points(), method())
    assert cost.disk == {"model": expected}
    assert_same(model.state_dict(), before)
    told = [line for line in report(cost).splitlines() if line.startswith("disk")]
    optimizers, memory, server = expected
    assert told == [
        f"disk of a client: {optimizers} bytes of its optimizers' state, {memory} of its codec's memory"
        + (f"; {server} at the server for each client" if server else "")
    ]
    made = fit(tmp_path, Optimized(kind), Points(), method(), **settings)
    packs = [(one, path) for path in made.run.log_dir.rglob("*.states") for one in clients_of(path)]
    files = {one: read_pack(path, [one])[one] for one, path in packs}
    written = [("0", "optimizer/"), ("0", "codec/"), ("decoder-0", "")]
    sizes = [
        sum(tensor.nbytes for name, tensor in files.get(one, {}).items() if name.startswith(group) and name[0] != "/")
        for one, group in written
    ]
    assert tuple(sizes) == expected


def test_fresh_optimizers_and_codecs_without_memory_take_no_disk(tmp_path: Path) -> None:
    cost = foresee(trainer(tmp_path, uplink_codec=CastCodec("bfloat16")), Optimized("adam"), Points(), FedAvg())
    assert cost.disk == {"model": (0, 0, 0)}
    assert "disk" not in report(cost)
