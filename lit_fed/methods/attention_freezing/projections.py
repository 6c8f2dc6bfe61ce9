"""The query, key and value parameters of a network, also where one tensor holds all three.

Fused projections are split with ``torch.nn.utils.parametrize``: the tensor becomes the concatenation of parts that are
separate parameters. The network computes the same numbers, bit for bit, and an optimizer without a part cannot move it,
neither by weight decay nor by momentum.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lit_fed.errors import ConfigError

_TRIPLES = (
    ("query", "key", "value"),  # BERT, ELECTRA, ViT of transformers
    ("q_proj", "k_proj", "v_proj"),  # BART, LLaMA, timm's EVA
    ("q", "k", "v"),  # T5, CaiT
    ("q_lin", "k_lin", "v_lin"),  # DistilBERT
    ("to_q", "to_k", "to_v"),  # diffusers
    ("query_proj", "key_proj", "value_proj"),  # DeBERTa
    ("q_proj_weight", "k_proj_weight", "v_proj_weight"),  # nn.MultiheadAttention with other widths of keys or values
)
_SINGLE = {"q_bias": 0, "k_bias": 1, "v_bias": 2, "bias_k": 1, "bias_v": 2}  # parameters beside a fused projection
_NORMS = {"q_norm": 0, "k_norm": 1}
# The rows of these modules' projections are sorted by head first, so a part is not a block of rows.
_BY_HEAD = ("timm.models.tiny_vit", "timm.models.efficientformer", "timm.models.levit")


@dataclass(frozen=True)
class AttentionNames:
    """A network's attention parameters by name, weights and biases.

    Args:
        query: Names of the query projections and of norms of queries.
        key: Names of the key projections and of norms of keys.
        value: Names of the value projections.
    """

    query: tuple[str, ...]
    key: tuple[str, ...]
    value: tuple[str, ...]

    @property
    def kernel(self) -> tuple[str, ...]:
        """Queries and keys, which determine the attention kernel."""
        return self.query + self.key


class Stacked(nn.Module):
    """A parametrization: a tensor is the concatenation of equal parts along its first dimension.

    Args:
        parts: Number of parts.
    """

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, *parts: Tensor) -> Tensor:
        """The whole."""
        return torch.cat(parts)

    def right_inverse(self, whole: Tensor) -> tuple[Tensor, ...]:
        """The parts, copied."""
        return tuple(part.clone() for part in whole.chunk(self.parts))


def separate_attention(network: nn.Module) -> AttentionNames:
    """Split the attention into query, key and value parameters, in place, and return their names.

    Supports timm's fused ``qkv`` and ``kv``, ``nn.MultiheadAttention`` in all its forms, and separate projections under
    the names of transformers, timm and diffusers. Idempotent.

    Args:
        network: Any module.

    Returns:
        Names of parameters as in ``network.named_parameters()``.

    Note:
        Norms of queries and keys (``q_norm``, ``k_norm``) count as theirs, because they shape the kernel as the
        projections do. Position biases do not: Table 2 of FedFrozen counts T5 without them.
    """
    for path, module in list(network.named_modules()):
        if isinstance(module, nn.MultiheadAttention):
            _split_rows(module, "in_proj_weight", 3)
            _split_rows(module, "in_proj_bias", 3)
        for name in ("qkv", "kv"):
            projection = dict(module.named_children()).get(name)
            if projection is not None and not isinstance(projection, nn.Identity):
                parts = _num_parts(path, module, projection, name)
                _split_rows(projection, "weight", parts)
                _split_rows(projection, "bias", parts)
    return _names(network)


def merged(network: nn.Module) -> nn.Module:
    """A copy of a network that reverts `separate_attention`."""
    whole = copy.deepcopy(network)
    for module in list(whole.modules()):
        for name in list(getattr(module, "parametrizations", ())):
            if isinstance(module.parametrizations[name][0], Stacked):  # type: ignore[index]
                parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    return whole


def _num_parts(path: str, module: nn.Module, projection: nn.Module, name: str) -> int:
    """The number of row blocks of a fused projection: 3 for queries, keys, values, 2 for keys and values."""
    rows = getattr(getattr(projection, "weight", None), "shape", (0,))[0]
    proj = getattr(getattr(module, "proj", None), "weight", None)
    width = rows // (3 if name == "qkv" else 2) if proj is None else proj.shape[1]
    by_head = type(module).__module__ in _BY_HEAD or getattr(module, "head_first", False)
    if by_head or not rows or rows not in (2 * width, 3 * width):
        raise ConfigError(
            f"{path}.{name} ({type(module).__module__}.{type(module).__name__}) holds {rows} rows in an unknown order "
            "of queries, keys and values; choose a network with separate projections"
        )
    return int(rows) // int(width)


def _split_rows(module: nn.Module, name: str, parts: int) -> None:
    """Parametrize a tensor by its parts, unless it is missing or already parametrized."""
    if parametrize.is_parametrized(module, name) or getattr(module, name, None) is None:
        return
    parametrize.register_parametrization(module, name, Stacked(parts))


def _names(network: nn.Module) -> AttentionNames:
    by_role: tuple[list[str], list[str], list[str]] = ([], [], [])
    for path, module in network.named_modules():
        prefix = f"{path}." if path else ""
        before = sum(map(len, by_role))
        for role, name in _roles(module):
            by_role[role].append(prefix + name)
        if sum(map(len, by_role)) > before:  # an attention module: the parameters beside its projections belong to it
            for name, role in _SINGLE.items():
                if name in dict(module.named_parameters(recurse=False)):
                    by_role[role].append(prefix + name)
            for name, role in _NORMS.items():
                by_role[role].extend(f"{prefix}{name}.{tensor}" for tensor in _parameters_of(module, name))
    known = {name for name, _ in network.named_parameters()}
    query, key, value = ([name for name in dict.fromkeys(names) if name in known] for names in by_role)
    if not query or not key:
        raise ConfigError(
            f"the {len(known)} parameters of {type(network).__name__} include no query and key projections; choose a "
            "transformer, such as vit_tiny_patch16_224, or another method"
        )
    return AttentionNames(tuple(query), tuple(key), tuple(value))


def _roles(module: nn.Module) -> Iterator[tuple[int, str]]:
    """A module's direct projections: role (0 query, 1 key, 2 value) and parameter name."""
    fused: list[tuple[nn.Module, str, tuple[str, str]]] = []
    if isinstance(module, nn.MultiheadAttention):
        fused.append((module, "", ("in_proj_weight", "in_proj_bias")))
    for name in ("qkv", "kv"):
        child = dict(module.named_children()).get(name)
        if child is not None:
            fused.append((child, f"{name}.", ("weight", "bias")))
    for owner, prefix, tensors in fused:
        for name in tensors:
            if parametrize.is_parametrized(owner, name):
                originals = f"{prefix}parametrizations.{name}.original"
                parts = owner.parametrizations[name][0].parts  # type: ignore[index,union-attr]
                yield from ((role, f"{originals}{role - 3 + parts}") for role in range(3 - parts, 3))
        if dict(module.named_children()).get("q") is not None:  # beside keys and values that share a tensor
            yield from ((0, f"q.{name}") for name in _parameters_of(module, "q"))
    for triple in _TRIPLES:
        if all(dict(module.named_children()).get(name) is not None for name in triple):
            for role, name in enumerate(triple):
                yield from ((role, f"{name}.{tensor}") for tensor in _parameters_of(module, name))
        elif all(name in dict(module.named_parameters(recurse=False)) for name in triple):
            yield from enumerate(triple)


def _parameters_of(module: nn.Module, name: str) -> list[str]:
    """Names of a child's parameters; empty if the child does not exist."""
    child = dict(module.named_children()).get(name)
    return [] if child is None else [tensor for tensor, _ in child.named_parameters()]
