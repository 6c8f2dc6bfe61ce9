"""FedFrozen: the kernel freezes bit for bit, does not travel, and without the freeze it is FedAvg."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule
from torch import Tensor, nn

from lit_fed import Classifier, load_network, objective_of
from lit_fed.data import Digits
from lit_fed.errors import ConfigError
from lit_fed.methods import FedAvg, FedFrozen
from lit_fed.methods.attention_freezing import separate_attention
from lit_fed.networks import Adapter
from tests.support import ROOT, assert_same, fit, rows, run_cli, saved_weights, weights

VIT: dict[str, Any] = {"patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}
ADAMW = lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1)  # noqa: E731


def model(seed: int = 0) -> Classifier:
    torch.manual_seed(seed)
    return Classifier("vit_tiny_patch16_224", ADAMW, network_args=VIT, input_shape=(1, 8, 8))


def digits() -> Digits:
    return Digits(num_clients=3, max_train_samples=120)


def trained(
    folder: Path, algorithm: FedAvg, rounds: int, ckpt_path: str | None = None, task: LightningModule | None = None
) -> tuple[dict[str, Tensor], Path]:
    settings: dict[str, Any] = {"max_rounds": rounds, "local_steps": 2, "evaluate_every": 0, "ckpt_path": ckpt_path}
    made = fit(folder, model() if task is None else task, digits(), algorithm, **settings)
    return weights(made), made.log_dir


def separated(task: LightningModule) -> dict[str, Tensor]:
    """A task's first weights, as FedFrozen names them."""
    separate_attention(task)
    return {name: parameter.detach().clone() for name, parameter in task.named_parameters()}


def test_frozen_after_three_rounds_of_adamw_and_after_a_resume_across_the_freeze(tmp_path: Path) -> None:
    method = FedFrozen(warmup_rounds=1)
    first, _ = trained(tmp_path / "one", method, 1)
    whole, _ = trained(tmp_path / "whole", FedFrozen(warmup_rounds=1), 4)
    kernel, start = method.attention.kernel, separated(model())
    for name in kernel:
        assert torch.equal(first[name], whole[name]), f"{name} moved after the freeze"
        assert not torch.equal(first[name], start[name]), f"{name} never trained"
    moved = [name for name in first if not torch.equal(first[name], whole[name])]
    assert set(moved) == first.keys() - set(kernel), "everything else trains on"
    trained(tmp_path / "parts", FedFrozen(warmup_rounds=1), 1)
    resumed, _ = trained(tmp_path / "parts", FedFrozen(warmup_rounds=1), 4, "last", model(seed=7))
    assert_same(whole, resumed)


def test_without_a_warm_up_the_kernel_never_moves(tmp_path: Path) -> None:
    method, start = FedFrozen(warmup_rounds=0), separated(model())
    end, _ = trained(tmp_path, method, 2)
    assert all(torch.equal(start[name], end[name]) for name in method.attention.kernel)
    assert not any(torch.equal(start[name], end[name]) for name in method.attention.value)


def test_the_kernel_trains_again_in_the_next_federation(tmp_path: Path) -> None:
    task, method = model(), FedFrozen(warmup_rounds=1)
    frozen, _ = trained(tmp_path / "frozen", method, 2, task=task)
    after, _ = trained(tmp_path / "after", FedFrozen(warmup_rounds=1), 1, task=task)
    assert not any(torch.equal(frozen[name], after[name]) for name in method.attention.kernel)


def test_the_same_seed_gives_the_baseline_the_same_network() -> None:
    x = torch.randn(5, 1, 8, 8)
    plain, task, method = model().eval(), model().eval(), FedFrozen()
    method.adapt(task)
    assert torch.equal(plain(x), task(x))
    # And as it is deployed it has the baseline's names.
    assert_same(plain.network.state_dict(), method.release(task).state_dict())


def test_a_warm_up_of_all_rounds_is_fedavg(tmp_path: Path) -> None:
    expected, plain = trained(tmp_path / "fedavg", FedAvg(), 3)
    task, method = model(), FedFrozen(warmup_rounds=3)
    _, frozen = trained(tmp_path / "frozen", method, 3, task=task)
    task.load_state_dict(saved_weights(frozen))
    whole = {name.removeprefix("network."): tensor for name, tensor in expected.items()}
    assert_same(whole, dict(method.release(task).state_dict()))
    assert [row["comm/total_bytes"] for row in rows(plain / "metrics.csv")] == [
        row["comm/total_bytes"] for row in rows(frozen / "metrics.csv")
    ]


def test_bytes_by_hand(tmp_path: Path) -> None:
    # Width 24, two blocks, 2×2 patches of 4×4 pixels. Each block: qkv 72·24 + 72, proj 24·24 + 24, MLP 96·24 + 96 and
    # 24·96 + 24, two norms of 48: 1800 + 600 + 2400 + 2328 + 96 = 7224. Patches 24·16 + 24 = 408, class token 24,
    # positions 5·24 = 120, last norm 48, head 10·24 + 10 = 250. Queries and keys: 2 blocks · 2 · (24·24 + 24) = 2400.
    total = 2 * 7224 + 408 + 24 + 120 + 48 + 250
    _, folder = trained(tmp_path, FedFrozen(warmup_rounds=1), 3)
    table = rows(folder / "metrics.csv")
    for direction in ("uplink", "downlink"):
        sent = [float(row[f"comm/{direction}_bytes"]) for row in table]
        assert sent == [4 * 3 * total, 4 * 3 * (total - 2400), 4 * 3 * (total - 2400)]


FILES = ("configs/quickstart.yaml", "configs/method/fedfrozen.yaml", "configs/network/vit_pocket.yaml")
SHORT = {
    "model.init_args.lr_scheduler.init_args.T_max": "3",  # and not all rounds: rates are the same in the shorter run
    "algorithm.warmup_rounds": "2",
    "data.init_args.num_clients": "8",
    "data.init_args.max_train_samples": "320",
    "trainer.participation.init_args.count": "4",
    "trainer.evaluate_every": "0",
    "trainer.logger": "false",
    "trainer.enable_progress_bar": "false",
}


def run(folder: Path, *options: str) -> Path:
    words = [word for path in FILES for word in ("-c", str(ROOT / path))]
    words += [f"--{key}={value}" for key, value in SHORT.items()]
    folder.mkdir(exist_ok=True)
    done = run_cli("fit", *words, *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "lightning_logs" / "version_0"


@pytest.mark.long
def test_two_processes_freeze_the_same_bits_which_load_as_the_network_was_built(tmp_path: Path) -> None:
    early = saved_weights(run(tmp_path / "early", "--trainer.max_rounds=2", "--trainer.devices=2"))
    folder = run(tmp_path / "late", "--trainer.max_rounds=3", "--trainer.devices=2")
    late = saved_weights(folder)
    kernel = [name for name in early if name.endswith(("original0", "original1"))]
    assert kernel
    assert all(torch.equal(early[name], late[name]) for name in kernel)
    assert not all(torch.equal(early[name], late[name]) for name in early)
    network = load_network(folder).network
    fused = [f"network.blocks.0.attn.qkv.parametrizations.weight.original{part}" for part in range(3)]
    assert torch.equal(network.get_parameter("blocks.0.attn.qkv.weight"), torch.cat([late[name] for name in fused]))


def test_ridge_on_the_value_block_by_hand() -> None:
    task, method = model(), FedFrozen(value_ridge=0.5)
    objective = objective_of(task, method)
    batch = torch.randn(4, 1, 8, 8), torch.arange(4)
    with torch.no_grad():
        for name in method.attention.value:  # 2 blocks · (24·24 + 24) values of 2: ½·0.5·1200·4 = 1200
            task.get_parameter(name).fill_(2.0)
        plain = task.training_step(batch, 0)
    total = objective.training_step(batch, 0)
    assert isinstance(total, Tensor)
    assert total.item() == pytest.approx(1200 + plain.item(), rel=1e-6)
    (total - task.training_step(batch, 0)).backward()
    for name, parameter in task.named_parameters():  # λθ = 1; the loss itself is taken away again
        assert parameter.grad is not None
        expected = float(name in method.attention.value)
        torch.testing.assert_close(parameter.grad, torch.full_like(parameter, expected), atol=1e-5, rtol=0)


# --- any task --------------------------------------------------------------------------------------------------------


class Rows(LightningModule):
    """Reads an image as eight tokens, one a row; knows of no federation, and has no network of its own."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(64, 10)
        self.automatic_optimization = not by_hand

    def forward(self, x: Tensor) -> Tensor:
        rows = x.squeeze(1)
        output: Tensor = self.out((rows + self.attend(rows, rows, rows, need_weights=False)[0]).flatten(1))
        return output

    def training_step(self, batch: Any) -> Any:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=0.1)


@pytest.mark.parametrize("by_hand", [False, True])
def test_any_task_with_attention(by_hand: bool, tmp_path: Path) -> None:
    method, start = FedFrozen(warmup_rounds=0), separated(Rows())
    end, folder = trained(tmp_path, method, 2, task=Rows(by_hand))
    moved = {name for name in end if not torch.equal(start[name], end[name])}
    assert method.attention.kernel
    assert moved == end.keys() - set(method.attention.kernel)
    # Queries and keys: 2 · (8·8 + 8). Of the whole 3 · 72 + 72 in the attention and 64·10 + 10 after it, these stay.
    assert [float(row["comm/uplink_bytes"]) for row in rows(folder / "metrics.csv")] == [4 * 3 * (288 + 650 - 144)] * 2


def test_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.warmup_rounds is -1"):
        FedFrozen(warmup_rounds=-1)
    with pytest.raises(ConfigError, match=r"algorithm\.value_ridge is -0\.5"):
        FedFrozen(value_ridge=-0.5)
    plain = Classifier("mlp", input_shape=(1, 8, 8))
    missing = "algorithm FedFrozen needs attention in model Classifier: the 4 parameters of Classifier include no query"
    with pytest.raises(ConfigError, match=missing):
        fit(tmp_path, plain, digits(), FedFrozen())
    with pytest.raises(ConfigError, match="Rows optimises by hand, and algorithm FedFrozen needs a loss"):
        fit(tmp_path, Rows(by_hand=True), digits(), FedFrozen(value_ridge=0.1))


def test_an_adapter_that_moves_values_with_queries_and_keys_is_refused(tmp_path: Path) -> None:
    vit: dict[str, Any] = {"patch_size": 2, "embed_dim": 48, "depth": 1, "num_heads": 3}
    settings: dict[str, Any] = {"network": "vit_tiny_patch16_224", "input_shape": (1, 8, 8), "network_args": vit}
    data = Digits(num_clients=2, max_train_samples=40)
    with pytest.raises(
        ConfigError, match=r"as network\.blocks\.0\.attn\.qkv\.weight has; leave it out of model\.adapter"
    ):
        fit(tmp_path, Classifier(**settings, adapter=Adapter()), data, FedFrozen())
    with pytest.raises(ConfigError, match=r"FedFrozen needs attention that trains in model Classifier, and .* frozen"):
        fit(tmp_path, Classifier(**settings, adapter=Adapter(targets=["*.fc1"])), data, FedFrozen())
    made = fit(tmp_path, Classifier(**settings, adapter=Adapter(targets=["*.fc1"], train=["*"])), data, FedFrozen(1))
    assert "network.blocks.0.mlp.fc1.lora_A" in weights(made)
