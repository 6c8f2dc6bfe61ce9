"""Weights from files of MAE, ViTPose, ResFormer and RAF, and from our own checkpoints."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

import torch
from timm.layers.pos_embed import resample_abs_pos_embed
from torch import Tensor

from lit_fed.checks import check_choice
from lit_fed.errors import ConfigError
from lit_fed.networks.weights import read_tensors

_NAMES = (
    (r"^(module|network|backbone|encoder)\.", ""),
    (r"^embeddings\.patch_embeddings\.", "patch_embed."),
    (r"^patch_embed\.(proj|projection)\.", "patch_embed."),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^(encoder\.)?layers?\.(\d+)\.", r"blocks.\2."),
    (r"^(blocks\.\d+)\.ln([12])\.", r"\1.norm\2."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.attention\.attention\.", ".attn."),
    (r"\.ffn\.layers\.0\.0\.", ".mlp.fc1."),
    (r"\.ffn\.layers\.1\.", ".mlp.fc2."),
    (r"^(last_norm|ln1|layernorm)\.", "norm."),
    (r"^(global_)?pos_embed\.embed_layer\.", "gpe.conv."),
    (r"\.attn\.get_v\.", ".attn.lpe."),
    (r"^(keypoint_)?head\.deconv_layers\.", "head."),
    *((rf"^head\.{theirs}\.", f"head.{ours}.") for theirs, ours in
      (("deconv1", 0), ("batchnorm1", 1), ("deconv2", 3), ("batchnorm2", 4))),
)  # fmt: skip
"""Names in the files, and our names: of MAE, mmpose 0 and 1, `transformers`' ViTPose, ResFormer, RAF."""

_QKV = re.compile(r"^(.*\.attn\.)query(\.(weight|bias))$")

_OF_OTHERS = re.compile(
    r"^(mask_token|decoder_|data_preprocessor\.|head\.(weight|bias)$|fc_norm\.|head_dist\.|associate_keypoint_heads\.)"
)
"""Parts of the files besides the network: MAE's decoder, a classifier, other heads."""

_NEW = re.compile(r"^(gpe\.|cls_token$)|\.lpe\.|num_batches_tracked$")
"""Parameters that a file may lack, because its network does not have them."""

_TRAINED_WITH = "; choose the settings it was trained with"


def read_weights(path: Path, wanted: Mapping[str, Tensor], grid: tuple[int, int], part: str) -> dict[str, Tensor]:
    """The weights of a file that a network can load.

    Reads files of MAE (``model``), ViTPose, ResFormer and RAF (``state_dict`` or ``model``), of mmpose 0 and 1, of
    `transformers`' ViTPose (``.safetensors`` too), and our own checkpoints.
    A table of position embeddings is resampled to the network's grid, and left out where it has none. Embeddings that
    the file's network does not have start as they are.

    Args:
        path: The file.
        wanted: The network's own by name.
        grid: The grid of its table of position embeddings.
        part: ``all``, or ``backbone`` for everything except the head.
    """
    check_choice("PoseViT.weights_of", part, ("all", "backbone"))
    held = _renamed(read_tensors(path, "PoseViT.weights"), _last(wanted))
    if part == "backbone":
        wanted = {name: tensor for name, tensor in wanted.items() if not name.startswith("head.")}
        held = {name: tensor for name, tensor in held.items() if not name.startswith("head.")}
    table = held.pop("pos_embed", None)
    if table is not None and "pos_embed" in wanted:
        held["pos_embed"] = _resampled(table, grid, "cls_token" in wanted, path)
    if "cls_token" not in wanted:
        held.pop("cls_token", None)
    for name, tensor in wanted.items():
        hint = "; set weights_of to backbone to start with a new head" if name.startswith("head.") else ""
        if name not in held:
            if _NEW.search(name):
                continue
            near = get_close_matches(name, sorted(held.keys() - wanted.keys()), 1)
            nearest = f"; its nearest is {near[0]!r}" if near else ""
            raise ConfigError(f"{path} lacks the weight {name!r} of network PoseViT{nearest}{hint}")
        if held[name].shape != tensor.shape:
            shapes = f"{tuple(held[name].shape)}, and here it has {tuple(tensor.shape)}"
            raise ConfigError(f"{path}: the weight {name!r} has shape {shapes}{hint or _TRAINED_WITH}")
    odd = sorted(held.keys() - wanted.keys())
    if odd:
        raise ConfigError(f"{path} has the weight {odd[0]!r}, which network PoseViT lacks{_TRAINED_WITH}")
    return held


def _renamed(tensors: Mapping[str, Tensor], last: str) -> dict[str, Tensor]:
    """The tensors under our names, without the tensors of other networks in the file."""
    renamed = {}
    for name, tensor in tensors.items():
        for pattern, ours in _NAMES:
            name = re.sub(pattern, ours, name)
        name = re.sub(r"^((keypoint_)?head\.final_layer|head\.conv)\.", last, name)
        if not _OF_OTHERS.match(name):
            renamed[name] = tensor
    return _joined(renamed)


def _joined(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors with queries, keys and values as one each."""
    for name in list(tensors):
        if parts := _QKV.match(name):
            names = [f"{parts[1]}{part}{parts[2]}" for part in ("query", "key", "value")]
            if all(part in tensors for part in names):
                tensors[f"{parts[1]}qkv{parts[2]}"] = torch.cat([tensors.pop(part) for part in names])
    return tensors


def _last(wanted: Mapping[str, Tensor]) -> str:
    """The position of the convolution that makes heatmaps in a deconvolution head."""
    names = [name for name in wanted if name.startswith("head.") and name.endswith(".bias")]
    return names[-1].removesuffix("bias")


def _resampled(table: Tensor, grid: tuple[int, int], class_token: bool, path: Path) -> Tensor:
    """A table of position embeddings for a grid; without a class token, its embedding is added to all positions."""
    places, count = grid[0] * grid[1], table.shape[1]
    prefix = count - places if count - places in (0, 1) else int(math.isqrt(count - 1) ** 2 == count - 1)
    side = math.isqrt(count - prefix)
    theirs = grid if count - prefix == places else (side, side)
    if table.ndim != 3 or theirs[0] * theirs[1] != count - prefix:
        raise ConfigError(f"{path}: 'pos_embed' has {count} places; they must form a square or the grid {grid}")
    of_class, of_grid = table[:, :prefix], table[:, prefix:]
    of_grid = resample_abs_pos_embed(of_grid, list(grid), list(theirs), num_prefix_tokens=0)
    if class_token:
        of_class = of_class if prefix else torch.zeros_like(of_grid[:, :1])
        return torch.cat((of_class, of_grid), dim=1)
    everywhere: Tensor = of_grid + of_class if prefix else of_grid
    return everywhere
