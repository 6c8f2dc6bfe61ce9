"""Low-rank adapters on linear layers and attention, of timm, torchvision and transformers, and peft's adapters."""

from __future__ import annotations

import copy
from runpy import run_path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lit_fed.errors import ConfigError
from lit_fed.networks import Adapter, LoRALinear, adapt_network, adapters_of, build_network, classifier
from lit_fed.networks.adapters import LoRAWeight
from lit_fed.poses import KeypointEstimator
from lit_fed.tasks import Classifier, Regressor
from tests.support import ROOT

VIT = {"patch_size": 4, "embed_dim": 32, "depth": 1, "num_heads": 2}


class Attends(nn.Module):
    """Self-attention of width 4 with two heads, then a head."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.attn(x, x, x)[0].mean(1))


def adapted(network: nn.Module, **settings: Any) -> nn.Module:
    adapt_network(network, network.head, Adapter(**settings))  # type: ignore[arg-type]  # a module
    return network


def filled(network: nn.Module) -> nn.Module:
    """With a B that is not zero."""
    with torch.no_grad():
        for one in adapters_of(network):
            network.get_parameter(one.lora_b).normal_()
    return network


def merged(network: nn.Module) -> dict[str, Tensor]:
    """W + s·BA by the name of W, and all other tensors of a network without adapters."""
    tensors = dict(network.state_dict())
    for one in adapters_of(network):
        a, b = tensors.pop(one.lora_a), tensors.pop(one.lora_b)
        tensors[one.base] = tensors[one.base] + one.scale * b @ a
    return {name.replace(".original", "").replace("parametrizations.", ""): t for name, t in tensors.items()}


def test_a_linear_layer_by_hand() -> None:
    # W = [[1, 2, 3], [0, 1, 0]], b = (1, −1), A = (1, 0, −1), B = (2, 1), α/r = 3 / 1; x = (1, 1, 2).
    # Wx + b = (1 + 2 + 6 + 1, 1 − 1) = (10, 0); Ax = −1; s·BAx = 3·(2, 1)·(−1) = (−6, −3).
    base = nn.Linear(3, 2)
    base.weight.data, base.bias.data = torch.tensor([[1.0, 2, 3], [0, 1, 0]]), torch.tensor([1.0, -1])
    layer = LoRALinear(base, 1, 3.0)
    assert layer(torch.tensor([1.0, 1, 2])).tolist() == [10.0, 0.0]  # B is zero at first
    layer.lora_A.data, layer.lora_B.data = torch.tensor([[1.0, 0, -1]]), torch.tensor([[2.0], [1]])
    assert layer(torch.tensor([1.0, 1, 2])).tolist() == [4.0, -3.0]
    assert layer.weight is base.weight
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias", "lora_A", "lora_B"]


def test_a_is_uniform_within_one_over_the_root_of_the_width() -> None:
    layer = LoRALinear(nn.Linear(400, 300), 50, 1.0)
    assert 0.049 < float(layer.lora_A.detach().abs().max()) <= 0.05  # 1/√400
    assert not layer.lora_B.any()


def test_attention_of_torch_is_attention_with_the_sum_of_both() -> None:
    torch.manual_seed(0)
    network = adapted(Attends(), rank=2)
    assert {one.base for one in adapters_of(network)} == {
        "attn.parametrizations.in_proj_weight.original", "attn.out_proj.parametrizations.weight.original",
    }  # fmt: skip
    filled(network)
    plain = Attends()
    plain.load_state_dict(merged(network))
    x = torch.randn(5, 6, 4)
    for training in (True, False):  # evaluation takes another path
        torch.testing.assert_close(network.train(training)(x), plain.train(training)(x))
    with torch.no_grad():
        torch.testing.assert_close(network(x), plain(x))


def _timm(name: str, **settings: Any) -> nn.Module:
    return build_network(name, 3, 3, (3, 16, 16), **settings)


def _torchvision() -> nn.Module:
    from torchvision.models import VisionTransformer

    network = VisionTransformer(16, 4, 1, 2, 32, 64, num_classes=3)
    network.head = network.heads.head  # type: ignore[assignment]  # a module
    return network


def _bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        image_size=16, patch_size=4, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
    )  # fmt: skip
    network: nn.Module = transformers.ViTForImageClassification(config)
    network.head = network.classifier
    return network


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: _timm("vit_tiny_patch16_224", **VIT), 4),  # qkv, proj, fc1, fc2
        (lambda: _timm("beit_base_patch16_224", **VIT), 4),  # whose attention reads the weight of qkv
        (lambda: _timm("swinv2_tiny_window8_256", patch_size=2, embed_dim=12, depths=(1,), num_heads=(2,)), 6),
        (_torchvision, 4),
        (_bert, 6),  # query, key, value, output, intermediate and output
    ],
    ids=["timm_vit", "timm_beit", "timm_swin", "torchvision", "transformers"],
)
def test_every_adapter_of_a_transformer_works(make: Any, count: int) -> None:
    torch.manual_seed(0)
    network = make()
    for parameter in network.parameters():  # some begin at zero, and nothing below them has a gradient
        nn.init.normal_(parameter, std=0.3)
    head = network.head if isinstance(getattr(network, "head", None), nn.Linear) else classifier(network)
    before, x = copy.deepcopy(network).eval(), torch.randn(2, 3, 16, 16)
    adapt_network(network, head, Adapter(rank=2))
    network.eval()

    def outputs(made: nn.Module) -> Tensor:
        found: Any = made(x)
        return found if isinstance(found, Tensor) else found.logits  # type: ignore[no-any-return]  # of transformers

    torch.testing.assert_close(outputs(network), outputs(before), rtol=0, atol=1e-6)  # B is zero
    found = adapters_of(network)
    assert len(found) >= count
    filled(network)
    outputs(network).square().sum().backward()
    for name, parameter in network.named_parameters():
        trains = "lora_" in name or any(parameter is own for own in head.parameters())
        assert parameter.requires_grad == trains, name
        assert (parameter.grad is not None and bool(parameter.grad.any())) == trains, name


def test_full_rank_reaches_what_full_fine_tuning_reaches() -> None:
    """Least squares on a linear layer of width 3 → 2, whose optimum is the data's."""
    torch.manual_seed(0)
    x, wanted = torch.randn(50, 3), torch.randn(50, 2)
    best = torch.linalg.lstsq(torch.cat([x, torch.ones(50, 1)], 1), wanted).solution
    least = float((torch.cat([x, torch.ones(50, 1)], 1) @ best - wanted).square().mean())
    base = nn.Linear(3, 2)
    base.bias.data = best[3]  # it stays
    layer = LoRALinear(base, 2, 1.0)
    base.requires_grad_(False)
    steps = torch.optim.LBFGS([layer.lora_A, layer.lora_B], max_iter=500, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        steps.zero_grad()
        value = (layer(x) - wanted).square().mean()
        value.backward()  # type: ignore[no-untyped-call]  # of torch
        return value

    steps.step(loss)  # type: ignore[no-untyped-call]  # of torch
    assert float(loss()) == pytest.approx(least, rel=1e-4)


def test_rank_0_is_a_linear_probe_or_full_fine_tuning() -> None:
    probe = adapted(_timm("vit_tiny_patch16_224", **VIT), rank=0)
    assert [name for name, p in probe.named_parameters() if p.requires_grad] == ["head.weight", "head.bias"]
    full = adapted(_timm("vit_tiny_patch16_224", **VIT), rank=0, train=["*"])
    assert all(parameter.requires_grad for parameter in full.parameters())


def test_targets_and_further_parameters_by_pattern() -> None:
    network = adapted(_timm("vit_tiny_patch16_224", **VIT), targets=["blocks.*.attn"], train=["head", "*norm*"])
    assert [one.base for one in adapters_of(network)] == ["blocks.0.attn.qkv.weight", "blocks.0.attn.proj.weight"]
    trains = {name for name, p in network.named_parameters() if p.requires_grad and "lora" not in name}
    assert trains == {"head.weight", "head.bias"} | {n for n, _ in network.named_parameters() if "norm" in n}
    assert adapters_of(adapted(Attends(), rank=2, alpha=1.0))[0].scale == 0.5
    assert adapters_of(adapted(Attends(), rank=2))[0].scale == 2.0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rank": -1}, r"model\.adapter\.rank is -1"),
        ({"alpha": 0.0}, r"model\.adapter\.alpha is 0\.0; it must be above 0, or None for twice the rank"),
        ({"rank": 33}, r"rank is 33, and blocks\.0\.attn\.qkv maps 32 to 96 values; it must be at most 32"),
        ({"targets": ["block.*"]}, r"targets is 'block\.\*', and no linear layer or attention .*did you mean blocks"),
        ({"targets": ["zzz"]}, r"targets is 'zzz', .*there are blocks"),
        ({"targets": ["head"]}, r"targets is 'head', and no linear layer or attention below the head"),
        ({"train": ["heat"]}, r"train is 'heat', and no parameter is called or begins so; did you mean head"),
        ({"rank": 0, "train": []}, r"model\.adapter leaves nothing to train in VisionTransformer"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        adapted(_timm("vit_tiny_patch16_224", **VIT), **settings)


def test_a_network_without_linear_layers_is_refused() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
    with pytest.raises(ConfigError, match="Sequential has no linear layer or attention below its head; set it to 0"):
        adapt_network(network, network[1], Adapter())
    with pytest.raises(ConfigError, match="the network has no linear layer below its head"):
        adapt_network(network, network[1], Adapter(targets=["1"]))


def test_adapters_of_others_are_found() -> None:
    task = run_path(str(ROOT / "examples" / "my_lora.py"))["LitLoRA"](rank=4)
    found = adapters_of(task)
    assert [one.base for one in found] == ["network.1.base.weight", "network.3.base.weight"]
    assert {one.scale for one in found} == {2.0}  # α is 8


def test_adapters_of_peft_are_found_or_refused() -> None:
    peft = pytest.importorskip("peft")
    settings = {"r": 4, "lora_alpha": 6, "target_modules": ["fc1", "qkv"]}
    (one, _) = adapters_of(peft.get_peft_model(_timm("vit_tiny_patch16_224", **VIT), peft.LoraConfig(**settings)))
    assert one.scale == 1.5
    assert one.base.endswith("qkv.base_layer.weight")
    assert one.lora_b.endswith("qkv.lora_B.default.weight")
    dora = peft.get_peft_model(_timm("vit_tiny_patch16_224", **VIT), peft.LoraConfig(**settings, use_dora=True))
    with pytest.raises(ConfigError, match="is not an adapter W"):
        adapters_of(dora)
    bad = adapted(Attends(), rank=2)
    module: Any = bad.get_submodule("attn.parametrizations.in_proj_weight.0")
    module.lora_A = nn.Parameter(torch.zeros(2, 5))
    with pytest.raises(ConfigError, match=r"A must be \(r, n\) and B \(m, r\)"):
        adapters_of(bad)


def test_a_parametrized_weight_is_merged_by_torch() -> None:
    network = filled(adapted(Attends(), rank=2))
    wanted = merged(network)["attn.in_proj_weight"]
    attention: Any = network.get_submodule("attn")
    assert isinstance(attention.parametrizations.in_proj_weight[0], LoRAWeight)
    parametrize.remove_parametrizations(attention, "in_proj_weight")
    torch.testing.assert_close(attention.in_proj_weight, wanted)


def test_every_task_of_ours_takes_adapters() -> None:
    pose = KeypointEstimator(
        "pose_vit_tiny", num_joints=4, input_shape=(3, 32, 24), network_args={"depth": 1, "embed_dim": 16},
        flip_test=False, adapter=Adapter(rank=2),
    )  # fmt: skip
    for task in (
        Regressor("mlp", input_shape=(5,), adapter=Adapter(rank=1)),
        Classifier(adapter=Adapter(rank=0)),
        pose,
    ):
        head = {id(parameter) for parameter in task.head.parameters()}
        for name, parameter in task.named_parameters():
            assert parameter.requires_grad == (id(parameter) in head or "lora_" in name), name
    assert adapters_of(pose)
