"""Adapters handed over: to peft, and in the weights of a network without adapters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from lit_fed import export_network, load_network
from lit_fed.errors import ConfigError
from lit_fed.handover.adapters import peft_files
from lit_fed.networks import Adapter, adapt_network, adapters_of, build_network
from tests.methods.support import run_quickstart
from tests.support import ROOT, saved_weights

VIT: dict[str, Any] = {"patch_size": 2, "embed_dim": 48, "depth": 2, "num_heads": 3}
FILES = {"adapter_config.json", "adapter_model.safetensors"}


def trained(folder: Path, method: str = "FedAvg") -> Path:
    """Two rounds of adapters on the pocket transformer."""
    words = ["-c", str(ROOT / "configs/network/vit_pocket.yaml"), "--model.adapter.rank", "3", "--algorithm", method]
    return run_quickstart(folder, *words, "--model.network", "vit_tiny_patch16_224")


def base(run: Path) -> nn.Module:
    """The network before the adapters, with its own weights."""
    network = build_network("vit_tiny_patch16_224", 10, 1, (1, 8, 8), **VIT)
    own = {name.removeprefix("network."): tensor for name, tensor in saved_weights(run).items()}
    network.load_state_dict({name: own[name] for name in network.state_dict()})
    torch.nn.init.zeros_(network.head.weight)  # type: ignore[arg-type,union-attr]  # the head is among the files
    return network.eval()


def logits(network: nn.Module) -> Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        found: Tensor = network(torch.rand(7, 1, 8, 8))
    return found


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("handed_over")
    done = export_network(run, folder, onnx=False)
    assert {*done.files} >= FILES
    assert "model.pt2" in done.files, done.lacking
    return folder


def test_peft_reads_them_and_gives_the_same_logits(run: Path, exported: Path) -> None:
    peft = pytest.importorskip("peft")
    own = load_network(run).network
    network = base(run)
    assert not torch.allclose(logits(network), logits(own), atol=1e-2)
    adapted = peft.PeftModel.from_pretrained(network, exported).eval()
    torch.testing.assert_close(logits(adapted), logits(own), rtol=0, atol=1e-5)
    torch.testing.assert_close(logits(adapted.merge_and_unload()), logits(own), rtol=0, atol=1e-5)


def test_the_weights_are_of_the_network_without_adapters(run: Path, exported: Path) -> None:
    network = base(run)
    network.load_state_dict(load_file(exported / "model.safetensors"))
    torch.testing.assert_close(logits(network), logits(load_network(run).network), rtol=0, atol=1e-5)
    assert "PeftModel" in (exported / "MODEL_CARD.md").read_text()


def test_the_configuration_names_what_was_adapted(exported: Path) -> None:
    told = json.loads((exported / "adapter_config.json").read_text())
    assert (told["r"], told["lora_alpha"], told["modules_to_save"]) == (3, 6.0, ["head"])
    layers = [f"blocks.{block}.{name}" for block in (0, 1) for name in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")]
    assert told["target_modules"] == layers
    assert len(load_file(exported / "adapter_model.safetensors")) == 2 * len(layers) + 2


@pytest.mark.parametrize("method", ["FedExLoRA", "FLoRA"])
def test_a_base_that_has_changed_is_handed_over_in_the_weights_alone(method: str, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", method)
    done = export_network(run, tmp_path / "out", onnx=False)
    assert not {*done.files} & FILES
    network = base(run)
    network.load_state_dict(load_file(tmp_path / "out" / "model.safetensors"))
    torch.testing.assert_close(logits(network), logits(load_network(run).network))


class Attends(nn.Module):
    """Attention that reads its own weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.hidden, self.head = nn.MultiheadAttention(4, 2), nn.Linear(4, 4), nn.Linear(4, 3)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"targets": ["attn"], "rank": 2},
            r"peft has no adapter for a weight that attention reads itself, such as",
        ),
        ({"targets": ["hidden"], "rank": 2, "train": ["hidden.bias"]}, "peft has no form for hidden, which trains"),
    ],
)
def test_what_peft_has_no_form_for_is_named(settings: dict[str, Any], said: str) -> None:
    network = Attends()
    adapt_network(network, network.head, Adapter(**settings))
    with pytest.raises(ConfigError, match=said):
        peft_files(network)


def test_ranks_that_differ_are_named() -> None:
    network = Attends()
    adapt_network(network, network.head, Adapter(rank=2, targets=["hidden"]))
    other = Attends()
    adapt_network(other, other.head, Adapter(rank=1, targets=["hidden"]))
    both = nn.ModuleDict({"one": network, "other": other})
    assert len(adapters_of(both)) == 2
    with pytest.raises(ConfigError, match="differ in their rank or scale"):
        peft_files(both)
