"""FedFrozen: the kernel freezes bit for bit, does not travel, and without the freeze it is FedAvg."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lit_fed.classifier import Classifier
from torch import Tensor

from lit_fed.command.cli import main
from lit_fed.errors import ConfigError
from lit_fed.methods import FedFrozen
from tests.methods.run_methods import CONFIGS, SMALL
from tests.support import assert_same, fit, rows, saved_weights

VIT: dict[str, Any] = {"patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 3}
ADAMW = lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1)  # noqa: E731


def make(kind: type[Classifier] = FedFrozen, seed: int = 0, **kwargs: Any) -> Any:
    torch.manual_seed(seed)
    settings: dict[str, Any] = {"network": "vit_tiny_patch16_224", "network_args": VIT, "input_shape": (1, 8, 8)}
    return kind(optimizer=ADAMW, local_epochs=None, local_steps=2, **(settings | kwargs))


def digits() -> Any:
    from lit_fed.data import Digits

    return Digits(num_clients=3, max_train_samples=120)


def trained(folder: Path, module: Any, rounds: int, ckpt_path: str | None = None) -> tuple[dict[str, Tensor], Path]:
    made = fit(folder, module, digits(), max_rounds=rounds, evaluate_every=0, ckpt_path=ckpt_path)
    assert made.federation is not None
    assert made.log_dir is not None
    return {n: t.clone() for n, t in made.federation.algorithm.global_state().items()}, made.log_dir


def test_frozen_after_three_rounds_of_adamw_and_after_a_resume_across_the_freeze(tmp_path: Path) -> None:
    kernel = make().attention.kernel
    first, _ = trained(tmp_path / "one", make(warmup_rounds=1), 1)
    whole, _ = trained(tmp_path / "whole", make(warmup_rounds=1), 4)
    for name in kernel:
        assert torch.equal(first[name], whole[name]), f"{name} moved after the freeze"
        assert not torch.equal(first[name], dict(make().named_parameters())[name]), f"{name} never trained"
    moved = [name for name in first if not torch.equal(first[name], whole[name])]
    assert set(moved) == first.keys() - set(kernel), "everything else trains on"
    trained(tmp_path / "parts", make(warmup_rounds=1), 1)
    resumed, _ = trained(tmp_path / "parts", make(warmup_rounds=1, seed=7), 4, "last")
    assert_same(whole, resumed)


def test_without_a_warm_up_the_kernel_never_moves(tmp_path: Path) -> None:
    module = make(warmup_rounds=0)
    start = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    end, _ = trained(tmp_path, module, 2)
    assert all(torch.equal(start[name], end[name]) for name in module.attention.kernel)
    assert not any(torch.equal(start[name], end[name]) for name in module.attention.value)


def test_the_same_seed_gives_the_baseline_the_same_network() -> None:
    x = torch.randn(5, 1, 8, 8)
    plain, frozen = make(Classifier).eval(), make().eval()
    assert torch.equal(plain(x), frozen(x))
    # And as it is deployed it has the baseline's names.
    assert_same(plain.network.state_dict(), frozen.deployable().state_dict())


def test_a_warm_up_of_all_rounds_is_fedavg(tmp_path: Path) -> None:
    _, plain = trained(tmp_path / "fedavg", make(Classifier), 3)
    module = make(warmup_rounds=3)
    _, frozen = trained(tmp_path / "frozen", module, 3)
    module.load_tensors(saved_weights(frozen))
    expected = {name.removeprefix("network."): tensor for name, tensor in saved_weights(plain).items()}
    assert_same(expected, dict(module.deployable().state_dict()))
    assert [row["comm/total_bytes"] for row in rows(plain / "metrics.csv")] == [
        row["comm/total_bytes"] for row in rows(frozen / "metrics.csv")
    ]


def test_bytes_by_hand(tmp_path: Path) -> None:
    # Width 24, two blocks, 2×2 patches of 4×4 pixels. Each block: qkv 72·24 + 72, proj 24·24 + 24, MLP 96·24 + 96 and
    # 24·96 + 24, two norms of 48: 1800 + 600 + 2400 + 2328 + 96 = 7224. Patches 24·16 + 24 = 408, class token 24,
    # positions 5·24 = 120, last norm 48, head 10·24 + 10 = 250. Queries and keys: 2 blocks · 2 · (24·24 + 24) = 2400.
    total = 2 * 7224 + 408 + 24 + 120 + 48 + 250
    _, folder = trained(tmp_path, make(warmup_rounds=1), 3)
    table = rows(folder / "metrics.csv")
    for direction in ("uplink", "downlink"):
        sent = [float(row[f"comm/{direction}_bytes"]) for row in table]
        assert sent == [4 * 3 * total, 4 * 3 * (total - 2400), 4 * 3 * (total - 2400)]


def test_two_processes_freeze_the_same_bits(tmp_path: Path) -> None:
    """`test_every_method.py` compares whole runs; here the kernel of its configuration after rounds 2 and 4."""
    from tests.methods.run_methods import run_method

    early = saved_weights(run_method(CONFIGS / "method" / "fedfrozen.yaml", tmp_path, 2))
    late = saved_weights(run_method(CONFIGS / "method" / "fedfrozen.yaml", tmp_path, 4))
    kernel = [name for name in early if name.endswith(("original0", "original1"))]
    assert len(kernel) == 8  # weight and bias, queries and keys, two blocks
    assert all(torch.equal(early[name], late[name]) for name in kernel)


def test_ridge_on_the_value_block_by_hand() -> None:
    module = make(value_ridge=0.5)
    x, y = torch.randn(4, 1, 8, 8), torch.arange(4)
    with torch.no_grad():
        for name in module.attention.value:  # 2 blocks · (24·24 + 24) values of 2: ½·0.5·1200·4 = 1200
            module.get_parameter(name).fill_(2.0)
    terms = module.loss_terms((x, y))
    assert terms["value_ridge"].item() == 1200.0
    terms["value_ridge"].backward()
    for name, parameter in module.named_parameters():  # λθ = 1
        expected = torch.ones_like(parameter) if name in module.attention.value else None
        assert (parameter.grad is None) == (expected is None), name
        assert expected is None or torch.equal(parameter.grad, expected)


def test_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"model\.warmup_rounds is -1"):
        make(warmup_rounds=-1)
    with pytest.raises(ConfigError, match=r"model\.value_ridge is -0\.5"):
        make(value_ridge=-0.5)
    words = [word for key, value in SMALL.items() for word in (f"--{key}", value)]
    files = ["-c", str(CONFIGS / "quickstart.yaml"), "-c", str(CONFIGS / "method/fedfrozen.yaml")]
    options = ["--model.network_args", "null", "--trainer.default_root_dir", str(tmp_path)]
    with pytest.raises(SystemExit):
        main(["fit", *files, *words, *options])
    assert "network MLP has no attention" in capsys.readouterr().err
