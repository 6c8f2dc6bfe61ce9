"""A pretrained base from a file: it is in no checkpoint, and is read again from an unchanged file only."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lit_fed import Classifier, FederatedTrainer, load_network
from lit_fed.algorithm import Cohort, Payload, Server
from lit_fed.data import Digits
from lit_fed.engine.loop.checkpoint import read_checkpoint
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.handover.export import export_network
from lit_fed.methods import FedAdam, FedAvg, FedBuff, FedExLoRA, FedPer, FLoRA, HetLoRA
from lit_fed.networks import Adapter, adapt_network, build_network, load_weights
from lit_fed.networks.base import file_of
from lit_fed.participation import Asynchronous
from lit_fed.poses.networks import PoseViT
from tests.methods.support import run_quickstart
from tests.support import ROOT, LeastSquares, Points, assert_same, fit, run_cli, saved_weights, trainer, weights

WIDE = 400
BASE = 4 * (WIDE * 2 + WIDE + WIDE * WIDE + WIDE)  # bytes
TRAINED = 4 * (WIDE + WIDE + WIDE + 1)  # A, B and the last layer


def layers(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, WIDE), nn.Tanh(), nn.Linear(WIDE, WIDE), nn.Tanh(), nn.Linear(WIDE, 1))


class Pretrained(LeastSquares):
    """Layers 2 → 400 → 400 → 1 of a file, of which the last trains beside an adapter of the middle one."""

    def __init__(self, file: Path | None, rank: int = 1, seed: int = 0) -> None:
        super().__init__(lr=1e-3)
        self.network = layers(seed)
        if file is not None:
            load_weights(self.network, file)
        adapt_network(self.network, None, Adapter(rank=rank, targets=["2"], train=["4"]))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tensors = layers(7).state_dict() | {"0.bias": torch.ones(WIDE), "2.bias": torch.ones(WIDE)}  # of one digest
    save_file(tensors, tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


def last(made: FederatedTrainer) -> Path:
    return made.log_dir / "checkpoints" / "last.ckpt"


def asynchronous() -> dict[str, Any]:
    return {"participation": Asynchronous(concurrency=3, buffer=2)}


@pytest.mark.parametrize(
    ("method", "slots", "personal"),
    [(FedAvg, 0, 0), (FedAdam, 2, 0), (lambda: FedPer(personal=["*lora_B*"]), 0, 4 * WIDE)],
    ids=["fedavg", "fedadam", "fedper"],
)
def test_a_checkpoint_holds_what_trains_alone(
    tmp_path: Path, file: Path, method: Callable[[], Any], slots: int, personal: int
) -> None:
    made = fit(tmp_path / "run", Pretrained(file), algorithm=method())
    assert last(made).stat().st_size <= (1 + slots) * TRAINED + personal + 64_000 < BASE / 5
    content = read_checkpoint(last(made))
    assert {(name, found) for name, (found, _) in content["base"]["model"].items()} == {
        (f"network.{name}", str(file)) for name in ("0.weight", "0.bias", "2.weight", "2.bias")
    }
    assert (
        content["state_dict"].keys()
        == made.run.federation.loops["model"].model.parameters.keys() - content["base"]["model"].keys()
    )


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        (FedAvg, dict),
        (FedAdam, dict),
        (FedExLoRA, dict),
        (FLoRA, dict),
        (lambda: FedPer(personal=["*lora_B*"]), dict),
        (FedBuff, asynchronous),
    ],
    ids=["fedavg", "fedadam", "fedexlora", "flora", "fedper", "fedbuff"],
)
def test_resumed_is_uninterrupted(
    tmp_path: Path, file: Path, method: Callable[[], Any], settings: Callable[[], dict[str, Any]]
) -> None:
    def run(folder: str, rounds: int, **more: Any) -> FederatedTrainer:
        task, data = Pretrained(file), Points(num_clients=6)
        return fit(tmp_path / folder, task, data, method(), max_rounds=rounds, **settings(), **more)

    whole = run("whole", 5)
    resumed = run("parts", 5, ckpt_path=str(last(run("parts", 3))))
    assert resumed.run.start_round == 3
    assert_same(weights(whole), weights(resumed))
    assert_same(saved_weights(whole.log_dir), saved_weights(resumed.log_dir))


def test_kinds_of_different_rank_share_the_base_of_one_file(tmp_path: Path, file: Path) -> None:
    def run(folder: str, rounds: int, **more: Any) -> FederatedTrainer:
        made = trainer(tmp_path / folder, max_rounds=rounds, kinds={"small": {}, "large": {}})
        made.fit({"small": Pretrained(file), "large": Pretrained(file, rank=3)}, Points(4), HetLoRA(), **more)
        return made

    whole, resumed = run("whole", 4), run("parts", 4, ckpt_path=str(last(run("parts", 2))))
    assert last(whole).stat().st_size <= 2 * 3 * TRAINED + 64_000 < BASE / 5
    for kind in ("small", "large"):
        assert_same(*(made.run.federation.global_model(3, kind) for made in (whole, resumed)))


@pytest.mark.parametrize("now", ["changed", "of another seed", "not named"])
def test_another_file_at_resume_is_refused_by_name(tmp_path: Path, file: Path, now: str) -> None:
    made = fit(tmp_path / "run", Pretrained(file))
    before = last(made).read_bytes()
    if now == "changed":
        tensors = load_file(file)
        tensors["2.bias"][3] += 1e-6
        save_file(tensors, file)
    elif now == "of another seed":
        save_file(layers(8).state_dict(), file)
    task = Pretrained(None if now == "not named" else file)
    with pytest.raises(CheckpointError, match=r"does not hold the pretrained weights of .*weights\.safetensors, and"):
        fit(tmp_path / "run", task, max_rounds=4, ckpt_path=str(last(made)))
    assert last(made).read_bytes() == before


def test_a_file_that_is_gone_is_named(tmp_path: Path, file: Path) -> None:
    fit(tmp_path / "run", Pretrained(file))
    file.unlink()
    with pytest.raises(ConfigError, match=r"weights\.safetensors'; the file does not exist"):
        Pretrained(file)


def test_what_is_written_to_is_no_longer_of_the_file(tmp_path: Path, file: Path) -> None:
    """By a hand before training, by a method in place, and by a second run of the same object."""
    task: Any = Pretrained(file)
    assert file_of(task.network[2].weight) == str(file)
    with torch.no_grad():
        task.network[2].weight.mul_(2)
    content = read_checkpoint(last(fit(tmp_path / "hand", task)))
    assert set(content["base"]["model"]) == {"network.0.weight", "network.0.bias", "network.2.bias"}
    assert "network.2.weight" in content["state_dict"]

    class InPlace(FedAvg):
        def step(self, server: Server, aggregate: Payload, cohort: Cohort) -> dict[str, float]:
            server["model"]["network.2.weight"].add_(1)
            return super().step(server, aggregate, cohort)

    def run(folder: str, rounds: int, **more: Any) -> FederatedTrainer:
        return fit(tmp_path / folder, Pretrained(file), algorithm=InPlace(), max_rounds=rounds, **more)

    whole, parts = run("whole", 3), run("parts", 1)
    assert torch.equal(saved_weights(parts.log_dir)["network.2.weight"], load_file(file)["2.weight"] + 1)
    assert_same(weights(whole), weights(run("parts", 3, ckpt_path=str(last(parts)))))

    task = Pretrained(file)
    first = fit(tmp_path / "twice", task, algorithm=FedExLoRA())
    again = fit(tmp_path / "twice", task)
    assert torch.equal(saved_weights(again.log_dir)["network.2.weight"], weights(first)["network.2.weight"])


def pocket(file: Path, **settings: Any) -> Classifier:
    """Two blocks for the digits, with adapters."""
    adapter = Adapter(rank=2)
    return Classifier(
        "mlp", lambda parameters: torch.optim.SGD(parameters, lr=0.1), num_classes=10, in_channels=1,
        input_shape=(1, 8, 8), weights=str(file), weights_of="backbone", adapter=adapter, **settings,
    )  # fmt: skip


@pytest.fixture
def digits(tmp_path: Path) -> tuple[Path, Path]:
    """A file, and the run from it by the command line."""
    torch.manual_seed(3)
    save_file(build_network("mlp", 4, 1, (1, 8, 8)).state_dict(), tmp_path / "mlp.safetensors")
    words = ["--model.weights", str(tmp_path / "mlp.safetensors"), "--model.weights_of", "backbone"]
    adapted = ["--model.network", "mlp", "--model.adapter.rank", "2"]
    return tmp_path / "mlp.safetensors", run_quickstart(tmp_path, *adapted, *words)


def test_every_reader_of_a_checkpoint_gets_the_base_again(digits: tuple[Path, Path], tmp_path: Path) -> None:
    file, run = digits
    path, x = run / "checkpoints" / "last.ckpt", torch.rand(5, 1, 8, 8)
    stem = load_file(file)
    found = load_network(path).network.state_dict()
    base = {name: tensor for name, tensor in stem.items() if not name.startswith("head")}
    assert base.keys() & found.keys() == base.keys() != found.keys()
    assert_same({name: found[name] for name in base}, base)
    given: Any = pocket(file).network
    loaded = load_network(path, given)
    assert torch.equal(loaded.network(x), load_network(path).network(x))
    task = pocket(file)  # by Lightning, which knows nothing of files: it is told that names are missing
    data = Digits(num_clients=10)
    data.setup("fit")
    tester = lightning.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False, barebones=True)
    with pytest.raises(RuntimeError, match="Missing key"):
        tester.test(task, data.test_loader(), ckpt_path=str(path), verbose=False)
    task.strict_loading = False
    tester.test(task, data.test_loader(), ckpt_path=str(path), verbose=False, weights_only=True)
    assert_same(task.network.state_dict(), found)
    exported = export_network(path, tmp_path / "exported", onnx=False)
    merged = load_file(exported.folder / "model.safetensors")
    lora = {name.rpartition(".")[2]: tensor for name, tensor in found.items() if "lora" in name}
    assert torch.allclose(merged["body.1.weight"], stem["body.1.weight"] + 2 * lora["lora_B"] @ lora["lora_A"])
    with pytest.raises(ConfigError, match="is a checkpoint without its pretrained weights; name what lit-fed export"):
        pocket(path)

    stem["body.1.bias"][0] += 1
    save_file(stem, file)
    for read in (lambda: load_network(path), lambda: load_network(path, pocket(file).network)):
        with pytest.raises(CheckpointError, match=r"weights of .*mlp\.safetensors, and '(network\.)?body\.1\.bias'"):
            read()
    file.unlink()
    with pytest.raises(CheckpointError, match=r"mlp\.safetensors'; the file does not exist"):
        load_network(path)


def test_weights_below_attention_and_of_pose_networks_are_of_their_file(tmp_path: Path) -> None:
    """Adapters that are parametrizations write to the weights when they are registered, with the same values."""
    from torchvision.models import VisionTransformer

    network = VisionTransformer(16, 8, 1, 2, 32, 64, num_classes=5)
    save_file(network.state_dict(), tmp_path / "vit.safetensors")
    load_weights(network, tmp_path / "vit.safetensors")
    adapt_network(network, network.heads, Adapter(rank=2))
    small: dict[str, Any] = {"patch_size": 8, "embed_dim": 8, "depth": 1, "num_heads": 2}
    save_file(PoseViT(3, **small).state_dict(), tmp_path / "pose.safetensors")
    pose = PoseViT(3, **small, weights=tmp_path / "pose.safetensors")
    for one, file in ((network, "vit.safetensors"), (pose, "pose.safetensors")):
        found = {name: file_of(tensor) for name, tensor in one.named_parameters() if "lora" not in name}
        assert set(found.values()) == {str(tmp_path / file)}


def test_a_digest_of_no_type_is_refused(tmp_path: Path, file: Path) -> None:
    made = fit(tmp_path / "run", Pretrained(file), max_rounds=1)
    content = read_checkpoint(last(made))
    names = {name: (found, "save:" + digest) for name, (found, digest) in content["base"]["model"].items()}
    torch.save(content | {"base": {"model": names}}, last(made))
    with pytest.raises(CheckpointError, match="does not hold the pretrained weights of"):
        load_network(last(made), Pretrained(file).network)


@pytest.mark.parametrize("odd", [3, {"model": 3}, {"model": {"w": "x"}}, {"model": {"w": ("x", 3)}}])
def test_malformed_names_are_refused(tmp_path: Path, file: Path, odd: Any) -> None:
    path = last(fit(tmp_path / "run", Pretrained(file), max_rounds=1))
    torch.save(read_checkpoint(path) | {"base": odd}, path)
    with pytest.raises(CheckpointError, match="'base' does not name tensors"):
        read_checkpoint(path)


def test_precision_is_part_of_the_values(tmp_path: Path, file: Path) -> None:
    made = fit(tmp_path / "run", Pretrained(file), precision="bf16-true")
    resumed = fit(tmp_path / "run", Pretrained(file), precision="bf16-true", max_rounds=3, ckpt_path=str(last(made)))
    assert resumed.run.start_round == 2
    network = Pretrained(file).network
    found: dict[str, Tensor] = dict(load_network(last(resumed), network).network.state_dict())
    assert torch.equal(found["2.weight"], load_file(file)["2.weight"].bfloat16().float())


@pytest.mark.long
def test_two_processes_resume_as_one(tmp_path: Path) -> None:
    torch.manual_seed(3)
    save_file(build_network("mlp", 10, 1, (1, 8, 8)).state_dict(), tmp_path / "mlp.safetensors")
    words = ["fit", "-c", str(ROOT / "configs/quickstart.yaml"), "--model.network", "mlp", "--model.adapter.rank", "2"]
    words += ["--model.weights", "mlp.safetensors", "--trainer.accelerator", "cpu", "--trainer.num_threads", "1"]
    for folder, devices, rounds, more in (("one", 1, 4, []), ("two", 2, 2, []), ("two", 2, 4, ["--ckpt_path", "last"])):
        own = {"default_root_dir": folder, "devices": devices, "max_rounds": rounds}
        told = [word for key, value in own.items() for word in (f"--trainer.{key}", str(value))]
        done = run_cli(*words, *told, *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    one, two = (tmp_path / folder / "lightning_logs" / "version_0" for folder in ("one", "two"))
    assert_same(saved_weights(one), saved_weights(two))
    assert read_checkpoint(two / "checkpoints" / "last.ckpt")["base"]["model"].keys() == {
        "network.body.1.weight", "network.body.1.bias"
    }  # fmt: skip
