"""A run's folder or checkpoint as a network in evaluation mode."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from torch import Tensor, nn

from lit_fed import Classifier, load_network
from lit_fed.callbacks import Checkpoint
from lit_fed.command import cli
from lit_fed.data import Digits, TensorDataModule
from lit_fed.engine.loop.checkpoint import read_checkpoint
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.methods import FedAvg
from tests.engine.loop.test_checkpoint import BEST_LR, checkpoints, judged
from tests.support import LeastSquares, Threes, fit, rows, weights


class Tied(nn.Module):
    """Input and output share one weight, as language models' embeddings do, and a module is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.again = self.norm
        self.last = nn.Linear(2, 2)
        self.last.weight = self.first.weight
        self.head = nn.Linear(2, 5)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.head(self.last(self.again(self.norm(self.first(x)))))
        return hidden


def network(kind: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    if kind == "tied":
        return Tied()
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 5))


@pytest.mark.parametrize("kind", ["plain", "tied"])
def test_load_network_gives_the_global_model(tmp_path: Path, kind: str) -> None:
    module = Classifier(network=network(kind), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    made = fit(tmp_path, module, Threes(3), FedAvg(), callbacks=[Checkpoint(monitor=None)])
    x = torch.randn(7, 2)
    module.load_state_dict(weights(made), strict=False)  # tied weights are there once
    expected = module.eval()(x).detach()
    for target in (made.log_dir, checkpoints(made) / "last.ckpt"):
        fresh = network(kind, seed=1)
        loaded = load_network(target, fresh)
        assert loaded.network is fresh
        assert not any(module.training for module in loaded.modules())
        assert torch.equal(loaded(x), expected)
    again = Classifier(network=network(kind, seed=1))
    assert torch.equal(load_network(made.log_dir, again)(x), expected)  # a whole module takes the weights too


def test_load_network_prefers_the_best_round(tmp_path: Path) -> None:
    made = fit(tmp_path, LeastSquares(lr=BEST_LR), max_rounds=4, callbacks=[judged()])
    loaded = load_network(made.log_dir, nn.Linear(2, 1, bias=False))
    expected = 2 * (1 - (1 - BEST_LR / 4) ** 2)  # w₁ after two rounds
    assert loaded(torch.tensor([[1.0, 0.0]])).item() == pytest.approx(expected, rel=1e-5)


def test_load_network_of_another_shape_or_without_configuration(tmp_path: Path) -> None:
    made = fit(tmp_path, max_rounds=1)
    for wrong in (nn.Linear(3, 1, bias=False), nn.Linear(2, 1), nn.Sequential(nn.Linear(2, 1)), nn.ReLU()):
        with pytest.raises(CheckpointError, match=r"best\.ckpt does not fit this network: "):
            load_network(made.log_dir, wrong)
    with pytest.raises(CheckpointError, match="holds no configuration; pass the network to load its weights into"):
        load_network(made.log_dir)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint at .*last\.ckpt"):
        load_network(tmp_path)


def test_load_network_of_a_run_of_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = {"accelerator": "cpu", "devices": 1, "max_rounds": 1, "logger": "false", "enable_progress_bar": "false"}
    data = {"num_clients": 2, "max_train_samples": 60, "max_test_samples": 40}
    args = [f"--trainer.{name}={value}" for name, value in trainer.items()]
    args += ["--data=Digits", *(f"--data.{name}={value}" for name, value in data.items())]
    cli.main(["fit", *args, "--model=Classifier", "--model.network=mlp", "--algorithm=FedAvg"])
    run = Path("lightning_logs/version_0")
    loaded = load_network(run)
    assert not isinstance(loaded.network, Classifier)
    assert not loaded.training
    x, y = stored(Digits(**data))
    assert reported(run) == pytest.approx(float((loaded(x).argmax(1) == y).float().mean()))


def test_load_network_of_a_method_that_changes_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # FedFrozen splits the fused projections; what is handed over has them in one piece again, as timm built it.
    monkeypatch.chdir(tmp_path)
    configs = Path(__file__).parents[2] / "configs"
    files = [configs / "quickstart.yaml", configs / "method/fedfrozen.yaml", configs / "network/vit_pocket.yaml"]
    small = ["--trainer.max_rounds=1", "--trainer.logger=false", "--trainer.enable_progress_bar=false"]
    small += ["--data.max_train_samples=200", "--data.max_test_samples=40", "--trainer.local_epochs=1"]
    small += ["--data.num_clients=5", "--data.partition.init_args.alpha=10"]
    cli.main(["fit", *(word for file in files for word in ("-c", str(file))), *small])
    run = Path("lightning_logs/version_0")
    loaded = load_network(run)
    assert "blocks.0.attn.qkv.weight" in loaded.network.state_dict()
    assert not any("parametrizations" in name for name in loaded.network.state_dict())
    x, y = stored(Digits(num_clients=5, seed=55, val_fraction=0.1, max_train_samples=200, max_test_samples=40))
    assert reported(run) == pytest.approx(float((loaded(x).argmax(1) == y).float().mean()))
    loss = float(torch.nn.functional.cross_entropy(loaded(x), y.long()))  # tells more networks apart than the accuracy
    assert reported(run, "global/loss") == pytest.approx(loss, rel=1e-5)
    exported = torch.export.export(loaded, (x[:2],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.testing.assert_close(exported.module()(x), loaded(x))


# ---------------------------------------------------------------------- what goes with the network


def stored(data: TensorDataModule) -> tuple[Tensor, Tensor]:
    """The shared test set as the data set stores it."""
    arrays = data.load_arrays()
    data.setup()
    chosen = data._ready.shared_test
    return torch.from_numpy(arrays.test.x[chosen]), torch.from_numpy(np.asarray(arrays.test.y)[chosen])


def reported(run: Path, metric: str = "global/acc") -> float:
    return float(rows(run / "metrics.csv")[-1][metric])


@pytest.mark.parametrize("size", [None, 16])
def test_bytes_go_in_and_what_goes_out_has_names_also_after_a_round_trip_by_torch_export(
    tmp_path: Path, size: int | None
) -> None:
    def data() -> Digits:
        return Digits(num_clients=4, image_size=size)

    torch.manual_seed(0)
    module = Classifier("small_cnn", input_shape=data().input_shape)
    made = fit(tmp_path, module, data(), max_rounds=2, local_epochs=3)
    loaded = load_network(made.log_dir, Classifier("small_cnn", input_shape=data().input_shape).network)
    assert loaded.class_names == ("0", "1", "2", "3", "4", "5", "6", "7", "8", "9")
    x, y = stored(data())
    assert (x.dtype, tuple(x.shape[1:])) == (torch.uint8, (1, 8, 8))
    logits = loaded(x)
    known = made.metrics["global/acc"]
    assert float((logits.argmax(1) == y).float().mean()) == pytest.approx(known)
    # Without its preprocessing the same network is a worse one, and nothing would say so.
    if size is None:
        assert float((loaded.network(x.float()).argmax(1) == y).float().mean()) < known - 0.05
    prepared = data()
    prepared.setup()
    assert torch.equal(loaded.preprocessing(x), torch.cat([batch for batch, _ in prepared.test_loader()]))  # to the bit
    exported = torch.export.export(loaded, (x[:2],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    torch.export.save(exported, tmp_path / "network.pt2")
    again = torch.export.load(tmp_path / "network.pt2").module()
    torch.testing.assert_close(again(x), logits)


class OwnCode(Threes):
    def normalization(self) -> Any:
        return lambda x: x * 2


def test_preprocessing_that_a_checkpoint_cannot_hold_is_said(tmp_path: Path) -> None:
    made = fit(tmp_path, LeastSquares(), OwnCode(2), max_rounds=1)
    told = (
        r"best\.ckpt lacks the preprocessing of OwnCode, which is custom code; pass inputs "
        "as that data module's loaders yield them"
    )
    with pytest.warns(UserWarning, match=told) as caught:
        loaded = load_network(made.log_dir, nn.Linear(2, 1, bias=False))
    assert caught[0].filename == __file__
    assert loaded.class_names is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_network(fit(tmp_path, max_rounds=1).log_dir, nn.Linear(2, 1, bias=False))  # takes what is stored


@pytest.mark.parametrize("steps", [[{"step": "exec"}], [{"step": "normalize", "std": [0.0]}], [3], [{}], 7])
def test_preprocessing_that_no_run_wrote_is_refused(tmp_path: Path, steps: Any) -> None:
    made = fit(tmp_path, max_rounds=1)
    path = checkpoints(made) / "last.ckpt"
    content = torch.load(path, weights_only=True)
    content["inputs"]["steps"] = steps
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=r"last\.ckpt is not a lit_fed checkpoint: its preprocessing is "):
        load_network(path, nn.Linear(2, 1, bias=False))


# ---------------------------------------------------------------------- what a checkpoint may name


EVIL = """
import torch
(open(__file__ + ".imported", "w")).close()


class Net(torch.nn.Module):
    pass


class Task(__import__("lightning").LightningModule):
    def __init__(self):
        super().__init__()
        self.network = torch.nn.Linear(2, 1, bias=False)


def optimizer(parameters):
    pass
"""
CLASSIFIER = "model: {class_path: lit_fed.Classifier, init_args: {num_classes: 3, input_shape: [2], network: mlp%s}}\n"
FEDAVG = "algorithm: {class_path: lit_fed.methods.FedAvg}\n"


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Loads a checkpoint whose configuration is this one, where a module ``evil`` could be imported."""
    path = checkpoints(fit(tmp_path, max_rounds=1)) / "last.ckpt"
    content = read_checkpoint(path)
    (tmp_path / "evil.py").write_text(EVIL)
    monkeypatch.syspath_prepend(tmp_path)

    def load(config: str, **kwargs: Any) -> Any:
        sys.modules.pop("evil", None)
        torch.save(content | {"config": config}, path)
        return load_network(path, **kwargs)

    return load


def imported(tmp_path: Path) -> bool:
    return (tmp_path / "evil.py.imported").exists()


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ("model: {class_path: evil.Task}\n" + FEDAVG, "evil.Task"),
        ("model: {class_path: evil.Nothing}\n" + FEDAVG, "evil.Nothing"),
        ("model: {class_path: not_there.Task}\n" + FEDAVG, "not_there.Task"),
        (CLASSIFIER % "" + "algorithm: {class_path: evil.Method}\n", "evil.Method"),
        (CLASSIFIER % ", optimizer: evil.optimizer" + FEDAVG, "evil.optimizer"),
        (CLASSIFIER % ", optimizer: os.system" + FEDAVG, "os.system"),
        (CLASSIFIER % ", optimizer: torch.hub.load" + FEDAVG, "torch.hub.load"),
        (CLASSIFIER % ", optimizer: {class_path: subprocess.Popen}" + FEDAVG, "subprocess.Popen"),
        (CLASSIFIER % ", optimizer: lit_fed.engine.storage.files.os.system" + FEDAVG, "posix.system"),
        (
            "model: {class_path: lit_fed.Classifier, init_args: {network: {class_path: evil.Net}}}\n" + FEDAVG,
            "evil.Net",
        ),
    ],
)
def test_a_module_that_a_checkpoint_names_is_not_imported_unasked(
    named: Callable[..., Any], tmp_path: Path, config: str, name: str
) -> None:
    with pytest.raises(
        CheckpointError, match=rf"last\.ckpt names {name}, which is not of lit_fed; if you trust"
    ) as caught:
        named(config)
    assert f"load_network(…, modules=['{name.rpartition('.')[0]}'])" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not imported(tmp_path)


@pytest.mark.parametrize("modules", [["evil"], ("evil", "os"), "evil"])
def test_a_module_that_is_allowed_is_imported(named: Callable[..., Any], tmp_path: Path, modules: Any) -> None:
    loaded = named("model: {class_path: evil.Task}\n" + FEDAVG, modules=modules)
    assert loaded.network.weight.shape == (1, 2)
    assert imported(tmp_path)


def test_what_is_allowed_once_is_not_allowed_again(named: Callable[..., Any], tmp_path: Path) -> None:
    """Nor is anything refused elsewhere in the process."""
    config = "model: {class_path: evil.Task}\n" + FEDAVG
    named(config, modules=["evil"])
    with pytest.raises(CheckpointError, match=r"names evil\.Task"):
        named(config)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(nn.Module, "net")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # by default the parser would warn of what it will refuse one day
        assert type(parser.instantiate(parser.parse_object({"net": "evil.Net"})).net).__name__ == "Net"


@pytest.mark.parametrize("modules", [["jsonargparse"], ["*"], ["a b"], [3], "../x"])
def test_modules_that_are_none(named: Callable[..., Any], modules: Any) -> None:
    with pytest.raises(ConfigError, match=r"modules is .*; it must list importable modules: "):
        named(CLASSIFIER % "" + FEDAVG, modules=modules)


@pytest.mark.parametrize(
    "config",
    [
        "model: {class_path: lit_fed.Nothing}\n" + FEDAVG,
        "model: {class_path: 3}\n" + FEDAVG,
        "model: 3\n" + FEDAVG,
        "model: {class_path: torch.nn.Linear}\n" + FEDAVG,
        CLASSIFIER % "" + "algorithm: {class_path: [1]}\n",
        CLASSIFIER % ", hidden: 3" + FEDAVG,
        CLASSIFIER % "",
        CLASSIFIER % ", optimizer: 3" + FEDAVG,
        "model: {class_path: lit_fed.Classifier, init_args: {network: no_such_network, num_classes: 3}}\n" + FEDAVG,
        "just a text",
        "- 1\n",
        "a: [",
        "a: !!python/name:os.system",
    ],
)
def test_a_configuration_that_cannot_be_rebuilt_is_refused_and_does_not_end_the_program(
    named: Callable[..., Any], capsys: pytest.CaptureFixture[str], config: str
) -> None:
    with pytest.raises(CheckpointError, match=r"last\.ckpt cannot be rebuilt from its configuration: \S") as caught:
        named(config)
    assert "\n" not in str(caught.value)
    assert "usage" not in capsys.readouterr().err


# ---------------------------------------------------------------------- files that a checkpoint may name


TIMM = "model: {class_path: lit_fed.Classifier, init_args: {num_classes: 3, input_shape: [3, 32, 32], %s}}\n"


@pytest.mark.parametrize(
    "args",
    [
        "network: resnet10t, network_args: {checkpoint_path: %s}",
        "network: resnet10t, network_args: {checkpoint_path: evil}",
        "network: resnet10t, network_args: '{checkpoint_path: evil}'",
        "network: resnet10t, network_args: {pretrained: true, pretrained_cfg: evil.pth}",
        "network: resnet10t, network_args: {pretrained_cfg: {file: evil}, checkpoint_path: ./evil}",
        "network: resnet10t, network_args: {cache_dir: evil}",
        "network: 'hf-hub:evil/net'",
        "network: 'local-dir:evil/net'",
        "network: {class_path: torchmetrics.text.BERTScore, init_args: {model_name_or_path: evil}}",
        "network: {class_path: lit_fed.networks.BertTiny, init_args: {input_shape: [8], num_classes: 3, a: ~/evil}}",
        "network: resnet10t, optimizer: evil",
        "network: resnet10t, optimizer: '-'",
        "network: resnet10t, optimizer: {class_path: torch.optim.SGD, init_args: evil}",
    ],
)
def test_a_file_that_a_checkpoint_names_is_not_read_unasked(
    named: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: str
) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return open, (str(tmp_path / "ran"), "w")

    monkeypatch.chdir(tmp_path)
    for name in ("evil", "evil.pth"):
        torch.save({"state_dict": Runs()}, name)
    config = TIMM % (args % (tmp_path / "evil.pth") if "%s" in args else args) + FEDAVG
    with pytest.raises(
        CheckpointError, match=r"last\.ckpt (names a file in its configuration|cannot be rebuilt)"
    ) as caught:
        named(config)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def test_a_model_that_is_the_name_of_a_file_is_refused(
    named: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("evil").write_text("{class_path: lit_fed.Classifier, init_args: {num_classes: 3, input_shape: [2]}}")
    with pytest.raises(CheckpointError, match="names a file in its configuration, model: 'evil'"):
        named("model: evil\n" + FEDAVG)


def test_weights_that_a_network_began_with_are_not_asked_for_again(tmp_path: Path) -> None:
    """The checkpoint has its own, and the file may be gone."""
    module = Classifier(
        network="test_vit", num_classes=5, input_shape=(3, 32, 32), optimizer=lambda p: torch.optim.SGD(p, lr=0.1)
    )
    path = tmp_path / "last.ckpt"
    content = read_checkpoint(checkpoints(fit(tmp_path, max_rounds=1)) / "last.ckpt")
    args = "network: test_vit, network_args: {pretrained: true, pretrained_cfg_overlay: {file: gone.safetensors}}"
    config = (TIMM % args).replace("num_classes: 3", "num_classes: 5") + FEDAVG
    torch.save(content | {"config": config, "state_dict": module.state_dict()}, path)
    loaded = load_network(path).network
    assert all(torch.equal(tensor, module.network.state_dict()[name]) for name, tensor in loaded.state_dict().items())


def test_a_module_that_is_allowed_is_given_its_paths(named: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text(EVIL.replace("def __init__(self):", "def __init__(self, words: str = ''):"))
    named("model: {class_path: evil.Task, init_args: {words: data/words.txt}}\n" + FEDAVG, modules=["evil"])


def test_a_text_that_stands_for_a_bomb_is_refused(named: Callable[..., Any]) -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    with pytest.raises(CheckpointError, match="stands for more than 100,000 values"):
        named(CLASSIFIER % f", network_args: '{{{', '.join(lines)}}}'" + FEDAVG)
