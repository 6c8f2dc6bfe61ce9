r"""Low-rank adapters beside the layers of a network that stays as it is.

Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen: "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022,
Equation 3: :math:`h = W_0x + \frac\alpha rBAx`, with :math:`A \in \mathbb R^{r\times n}` drawn at random and
:math:`B \in \mathbb R^{m\times r}` zero at first.
"""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from typing_extensions import override

from lit_fed.arguments import checked_class
from lit_fed.checks import check_range
from lit_fed.errors import ConfigError
from lit_fed.networks.base import file_of, loaded_from
from lit_fed.patterns import chosen_names


@checked_class
@dataclass(frozen=True)
class Adapter:
    """Parts of a network that train, while the rest stays.

    Rank 0 adds no adapters: with the default `train` it is a linear probe, with ``train: ["*"]`` full fine-tuning.

    Args:
        rank: r; 0 for no adapters.
        alpha: α, which scales an adapter by α/r; null for 2r.
        targets: Linear layers and attention that receive an adapter: names of modules, or patterns (``*.attn.*``); null
            for all below the head.
        train: Parameters that train beside the adapters: names, modules, or patterns; null for the head, an empty list
            for none.
    """

    rank: int = 4
    alpha: float | None = None
    targets: list[str] | None = None
    train: list[str] | None = None


class LoRALinear(nn.Linear):
    """A linear layer with an adapter; its ``weight`` and ``bias`` keep their names.

    Args:
        base: The layer, whose parameters are taken over.
        rank: r.
        scale: α/r.
    """

    def __init__(self, base: nn.Linear, rank: int, scale: float) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.scale = base.in_features, base.out_features, scale
        self.weight = base.weight
        self.register_parameter("bias", base.bias)
        self.lora_A, self.lora_B = _factors(base.weight, rank)

    @override
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.scale * F.linear(F.linear(input, self.lora_A), self.lora_B)


class LoRAWeight(nn.Module):
    """A parametrization: a weight with an adapter, where a module reads the weight itself, as attention does.

    Args:
        base: The weight, (m, n).
        rank: r.
        scale: α/r.
    """

    def __init__(self, base: Tensor, rank: int, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.lora_A, self.lora_B = _factors(base, rank)

    @override
    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * self.lora_B @ self.lora_A


def adapt_network(network: nn.Module, head: nn.Module | None, adapter: Adapter) -> None:
    """Freeze a network in place, and add what trains.

    Args:
        network: Any module.
        head: Its last layer, which never receives an adapter; None where there is none.
        adapter: The settings.

    Raises:
        ConfigError: For an unknown target or parameter, a rank above a layer's width, or if nothing trains.
    """
    check_range("model.adapter.rank", adapter.rank, least=0)
    check_range("model.adapter.alpha", adapter.alpha, above=0, null="for twice the rank")
    names = [name for name, _ in network.named_parameters()]
    heads = [] if head is None else [name for name, module in network.named_modules() if module is head]
    if adapter.train is None:
        trains: Collection[str] = [name for name in names if any(name.startswith(f"{found}.") for found in heads)]
    else:
        trains = chosen_names(adapter.train, names, "model.adapter.train")
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(name in trains)
    places = _places(network, heads)
    if adapter.targets is None:
        targets: Sequence[str] = list(places)
    else:
        key, what = "model.adapter.targets", "linear layer or attention below the head is called or begins so"
        if not places:
            raise ConfigError(
                f"{key} is {adapter.targets}, and the network has no linear layer below its head; remove it"
            )
        targets = chosen_names(adapter.targets, places, key, what)
    if adapter.rank:
        _add_adapters(network, {name: places[name] for name in targets}, adapter)
    if not any(parameter.requires_grad for parameter in network.parameters()):
        raise ConfigError(
            f"model.adapter leaves nothing to train in {type(network).__name__}; raise rank, or name some in train"
        )


def _add_adapters(network: nn.Module, places: Mapping[str, _Place], adapter: Adapter) -> None:
    if not places:
        raise ConfigError(
            f"model.adapter.rank is {adapter.rank}, and {type(network).__name__} has no linear layer or attention "
            "below its head; set it to 0, or choose a transformer"
        )
    rank = adapter.rank
    scale = 2.0 if adapter.alpha is None else adapter.alpha / rank
    for name, place in places.items():
        weight = getattr(place.owner, place.tensor)
        if rank > min(weight.shape):
            raise ConfigError(
                f"model.adapter.rank is {rank}, and {name} maps {weight.shape[1]} to {weight.shape[0]} values; it must "
                f"be at most {min(weight.shape)}, or leave the layer out of model.adapter.targets"
            )
        if place.reads_weight:
            file = file_of(weight)  # which registering writes to, with the same values
            parametrize.register_parametrization(place.owner, place.tensor, LoRAWeight(weight, rank, scale))
            if file is not None:
                lists: Any = place.owner.parametrizations
                loaded_from(lists[place.tensor].original, file)
        else:
            network.set_submodule(name, LoRALinear(place.owner, rank, scale))  # type: ignore[arg-type]  # an nn.Linear


@dataclass(frozen=True)
class _Place:
    """A weight that can receive an adapter.

    Args:
        owner: Its module.
        tensor: Its name in the module.
        reads_weight: Whether something else than the module's own `forward` reads the weight.
    """

    owner: nn.Module
    tensor: str
    reads_weight: bool


def _places(network: nn.Module, heads: Collection[str]) -> dict[str, _Place]:
    """The weights that can receive an adapter, by name of the module."""
    found = {}
    for name, module in network.named_modules():
        if any(name == head or name.startswith(f"{head}.") for head in heads):
            continue
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            found[name] = _Place(module, "in_proj_weight", True)
        elif isinstance(module, nn.Linear) and name:
            parent, _, own = name.rpartition(".")
            plain = type(module).forward is nn.Linear.forward and not parametrize.is_parametrized(module)
            read = own in _read_weights(network.get_submodule(parent))
            if plain or read:
                found[name] = _Place(module, "weight", read)
    return found


def _read_weights(parent: nn.Module) -> set[str]:
    """The children whose weight a module's `forward` reads, as ``nn.MultiheadAttention`` and timm's BEiT do."""
    try:
        source = inspect.getsource(type(parent).forward)
    except (OSError, TypeError):
        return set()
    return set(re.findall(r"self\.(\w+)\.weight\b", source))


def _factors(base: Tensor, rank: int) -> tuple[nn.Parameter, nn.Parameter]:
    """A, uniform in ±1/√n, and B, zeros."""
    lora_a, lora_b = base.new_empty(rank, base.shape[1]), base.new_zeros(base.shape[0], rank)
    return nn.Parameter(fresh_factor(lora_a)), nn.Parameter(lora_b)


def fresh_factor(lora_a: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw A, (r, n), anew in place."""
    with torch.no_grad():
        return nn.init.kaiming_uniform_(lora_a, a=math.sqrt(5), generator=generator)


def merge_adapters(network: nn.Module) -> nn.Module:
    """A copy of a network with our adapters added to its weights, under the names of the network without adapters."""
    whole = copy.deepcopy(network)
    for name, module in list(whole.named_modules()):
        if isinstance(module, LoRALinear):
            merged = nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
            added = module.scale * module.lora_B.detach() @ module.lora_A.detach()
            merged.weight, merged.bias = nn.Parameter(module.weight.detach() + added), module.bias
            whole.set_submodule(name, merged.train(module.training))
        for tensor in list(getattr(module, "parametrizations", ())):
            if isinstance(module.parametrizations[tensor][0], LoRAWeight):
                parametrize.remove_parametrizations(module, tensor)
    return whole


@dataclass(frozen=True)
class AdapterNames:
    """An adapter's parameters by name.

    Args:
        base: The weight that stays, (m, n).
        lora_a: A, (r, n).
        lora_b: B, (m, r).
        scale: α/r.
    """

    base: str
    lora_a: str
    lora_b: str
    scale: float


def adapters_of(network: nn.Module) -> list[AdapterNames]:
    """The low-rank adapters of a module: ours, peft's, and any layer of the same form.

    A layer has the form if its parameters are ``lora_A`` and ``lora_B``, beside a ``weight``, or a ``weight`` in a
    module ``base`` or ``base_layer``, and its scale is ``scale`` or peft's ``scaling``.

    Raises:
        ConfigError: For an adapter of another form, such as of a convolution, or peft's DoRA.
    """
    return list(_adapters_of(network))


def _adapters_of(network: nn.Module) -> Iterator[AdapterNames]:
    parameters = dict(network.named_parameters())
    for lora_a in parameters:
        if (match := re.fullmatch(r"(.*\.)?lora_A((?:\.(\w+))?\.weight)?", lora_a)) is None:
            continue
        path, rest, own = match[1] or "", match[2] or "", match[3] or ""
        lora_b = f"{path}lora_B{rest}"
        owner = network.get_submodule(path.rstrip("."))
        original = re.sub(r"\d+\.$", "original", path)  # of a parametrization
        names = [f"{path}weight", f"{path}base.weight", f"{path}base_layer.weight", original]
        base = next((name for name in names if name in parameters), None)
        scaling = getattr(owner, "scaling", None)
        scale = scaling.get(own) if isinstance(scaling, Mapping) else getattr(owner, "scale", None)
        other = getattr(owner, "fan_in_fan_out", False) or getattr(owner, "use_dora", {}).get(own, False)
        if base is None or lora_b not in parameters or not isinstance(scale, int | float) or other:
            raise ConfigError(
                f"{lora_a} is not an adapter W + s·BA with W, B and s beside it; choose layers of nn.Linear's form"
            )
        (rows, columns), a, b = parameters[base].shape[:2], parameters[lora_a].shape, parameters[lora_b].shape
        if tuple(a[1:]) != (columns,) or tuple(b) != (rows, a[0]):
            raise ConfigError(
                f"{lora_a} is {tuple(a)} beside W {tuple(parameters[base].shape)} and B {tuple(b)}; A must be (r, n) "
                "and B (m, r)"
            )
        yield AdapterNames(base, lora_a, lora_b, float(scale))
