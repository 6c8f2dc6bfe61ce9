"""Cases of adapters that do not fit their network, and of pretrained weights that are damaged or another network's."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from lit_fed.networks import build_network
from tests.bad_inputs.files import Damage, damages_of
from tests.bad_inputs.judge import Case
from tests.bad_inputs.options import fit
from tests.bad_inputs.values import WRONG

_MLP = "--model.network=mlp"
_ADAPTER = {
    "rank": ("-1", "65", "1000000000", *WRONG["int"]),
    "alpha": ("0", "-0.0", "-1", *WRONG["float"]),
    "targets": ("[]", "[nobody]", "[head]", "['']", "['*.attn.*']", "[body.1.weight]", *WRONG["list"]),
    "train": ("[nobody]", "['']", "['*.attn.*']", "[heads]", *WRONG["list"]),
    "nobody": ("1",),
}
_WHOLE = (
    "4",
    "[1]",
    "x",
    "{rank: 4, nobody: 1}",
    "{rank: {}}",
    "{rank: 0, train: []}",
    "{class_path: nobody.Adapter}",
    "{4: 4}",
)
_IN_KINDS = ("4", "{rank: x}", "{rank: 4, nobody: 1}", "{rank: -1}", "{targets: [nobody]}", "{rank: 0, train: []}")
_ELSEWHERE = {
    "below no layer": fit("--model.adapter.rank=2"),  # the quickstart's convolutions
    "on attention where there is none": fit("--model.adapter.targets=[attn]"),
    "of a method without adapters": fit(_MLP, "--algorithm=FedIT"),
    "of a method, of rank 0": fit(_MLP, "--algorithm=FedSALoRA", "--model.adapter.rank=0"),
    "that a mean of weights cannot combine": fit(
        _MLP, "--algorithm=FedIT", "--trainer.kinds={a: {adapter: {rank: 2}}, b: {adapter: {rank: 4}}}"
    ),
    "that FLoRA cannot combine": fit(
        *(_MLP, "--algorithm=FLoRA", "--model.adapter.rank=2"),
        "--trainer.kinds={a: {adapter: {rank: 2}}, b: {network_args: {hidden: [8]}}}",
    ),
    "of several scales": fit(
        _MLP, "--algorithm=HetLoRA", "--trainer.kinds={a: {adapter: {rank: 2}}, b: {adapter: {rank: 4, alpha: 3}}}"
    ),
}


def wrong_adapters(draw: random.Random) -> Iterator[Case]:
    """Settings of `model.adapter` that its network does not have, and methods that need other adapters."""
    yield Case("adapters that are good", fit(_MLP, "--model.adapter.rank=4", "--algorithm=FedIT"), status=(0,))
    while True:
        key = draw.choice([*_ADAPTER])
        value = draw.choice(_ADAPTER[key])
        if value not in ("None", "{}"):  # null, and the defaults
            yield Case(f"adapter.{key}={value!r:.60}", fit(_MLP, f"--model.adapter.{key}={value}"))
        value = draw.choice(_WHOLE)
        yield Case(f"adapter={value}", fit(_MLP, f"--model.adapter={value}"))
        value = draw.choice(_IN_KINDS)
        kinds = f"--trainer.kinds={{a: {{adapter: {value}}}, b: {{adapter: {{rank: 2}}}}}}"
        yield Case(f"a kind's adapter={value}", fit(_MLP, "--algorithm=FLoRA", kinds))
        name = draw.choice([*_ELSEWHERE])
        yield Case(f"adapters {name}", _ELSEWHERE[name])


# ---------------------------------------------------------------------- weights


def _weights(name: str = "mlp", **settings: Any) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = build_network(name, 10, 1, (1, 8, 8), **settings).state_dict()
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _folder(folder: Path) -> None:
    """A folder of two shards and their index."""
    tensors, place = _weights(), folder / "w"
    place.mkdir()
    shards = {name: f"{int(name.startswith('head'))}.safetensors" for name in tensors}
    for file in set(shards.values()):
        save_file({name: tensor for name, tensor in tensors.items() if shards[name] == file}, place / file)
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    (place / "config.json").write_text("{}")


_FORMS: dict[str, Damage] = {
    "w.safetensors": lambda folder: save_file(_weights(), folder / "w.safetensors"),
    "w.pth": lambda folder: torch.save({"state_dict": _weights()}, folder / "w.pth"),
    "w": _folder,
}
_INDEX = "w/model.safetensors.index.json"
_DAMAGED = ("w.safetensors", "w.pth", "w.ckpt", _INDEX, "w/0.safetensors", "w/config.json")


_IN_HEAD = (
    "other classes",
    "a complex tensor",
    "whole numbers",
    "texts",
    "an endless tensor",
    "a sparse tensor",
    "a tensor without values",
    "NaN",
)
"""Contents that differ in the head alone."""


def _with(**changes: Any) -> dict[str, Any]:
    return _weights() | {name.replace("_", "."): tensor for name, tensor in changes.items()}


def _contents() -> dict[str, Any]:
    """What a file of torch may hold in place of the network's weights."""
    bias = torch.zeros(10)
    return {
        "a list": [1, 2],
        "nothing": {},
        "a tensor": bias,
        "a pickled class": Path("x"),
        "numbers": {"head.bias": 1.0},
        "other names": {f"other.{name}.x": tensor for name, tensor in _weights().items()},
        "names that are numbers": dict(enumerate(_weights().values())),
        "half of the network": dict(list(_weights().items())[:1]),
        "another network": _weights("logistic"),
        "another width": _weights(hidden=[8]),
        "other classes": _with(head_bias=torch.zeros(7)),
        "a complex tensor": _with(head_bias=bias + 1j),
        "whole numbers": _with(head_bias=bias.long()),
        "texts": _with(head_bias="x"),
        "an endless tensor": _with(head_bias=torch.zeros(1).expand(10**12)),
        "a sparse tensor": _with(head_bias=bias.to_sparse()),
        "a tensor without values": _with(head_bias=bias.to("meta")),
        "weights of 8 bits": _with(head_SCB=bias),
        "NaN": _with(head_bias=bias / 0),
        "Lightning's": {"epoch": 1, "state_dict": {}, "pytorch-lightning_version": "2.6.0"},
    }


_INDEXES = ("", "{", "[]", "null", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 1}}')
_MAPS = ("../w.safetensors", "/etc/passwd", "", ".", "config.json", "model.safetensors.index.json", "2.safetensors")
_PLACES = ("", ".", "nowhere", "nowhere.bin", "/dev/null", "/proc/self/mem", "x" * 300, "x/" * 3000, "\ud800")
_NO_HEAD = "--model.network={class_path: torch.nn.Linear, init_args: {in_features: 64, out_features: 10}}"


def wrong_weights(run: Path) -> Callable[[random.Random], Iterator[Case]]:
    """Files of `model.weights` that are lost, damaged, or of another network.

    Args:
        run: A folder with a run, of which the checkpoint is taken.
    """
    checkpoint = run / "lightning_logs" / "version_0" / "checkpoints" / "last.ckpt"
    forms = _FORMS | {"w.ckpt": lambda folder: shutil.copy(checkpoint, folder / "w.ckpt")}

    def cases(draw: random.Random) -> Iterator[Case]:
        for name, write in forms.items():
            network = [] if name == "w.ckpt" else [_MLP]
            yield Case(f"weights that are good: {name}", fit(*network, f"--model.weights={name}"), write, status=(0,))
        while True:
            target = draw.choice(_DAMAGED)
            whole = target.partition("/")[0]
            damages = damages_of(draw)
            if target.endswith("config.json"):  # may be missing, and has two characters
                damages = {kind: damages[kind] for kind in ("empty", "random bytes", "NUL", "a page of HTML")}
            elif target.endswith(".safetensors"):
                del damages["overwritten"]  # the format has no checksum
            kind, damage = draw.choice([*damages.items()])
            yield Case(
                f"weights of which {target} is {kind}",
                fit(*([] if whole == "w.ckpt" else [_MLP]), f"--model.weights={whole}"),
                lambda folder, whole=whole, target=target, damage=damage: (
                    forms[whole](folder), damage(folder / target)
                ),
            )  # fmt: skip
            yield draw.choice([*_of_files(draw)])
            part = draw.choice(["all", "backbone"])
            args = fit(_MLP, "--model.weights=w.ckpt", f"--model.weights_of={part}")
            yield Case(f"{part} of the weights of another network's run", args, forms["w.ckpt"])

    return cases


def _of_files(draw: random.Random) -> Iterator[Case]:
    contents = _contents()
    kind, part = draw.choice([*contents]), draw.choice(["all", "backbone"])
    of_head = part == "backbone" and kind in _IN_HEAD
    yield Case(
        f"{part} of weights of {kind}",
        fit(_MLP, "--model.weights=w.pth", f"--model.weights_of={part}"),
        lambda folder: torch.save(contents[kind], folder / "w.pth"),
        status=(0,) if of_head else (2, 1) if kind == "NaN" else (2,),  # the first step finds it
    )
    text = draw.choice([*_INDEXES, *(json.dumps({"weight_map": {"a": file}}) for file in _MAPS)])
    yield Case(
        f"weights with the index {text}",
        fit(_MLP, f"--model.weights={draw.choice(['w', _INDEX])}"),
        lambda folder: (_folder(folder), (folder / _INDEX).write_text(text)),
    )
    place = draw.choice(_PLACES)
    yield Case(f"weights at {place!r:.40}", fit(_MLP, f"--model.weights={place}"))
    kinds = f"{{a: {{weights: {json.dumps(place)}}}}}"
    yield Case(f"a kind's weights at {place!r:.40}", fit(_MLP, f"--trainer.kinds={kinds}"))
    args = fit(_MLP, "--model.weights=w.pth", "--model.network_args={pretrained: true}")
    yield Case("weights from two sources", args, _FORMS["w.pth"])
    args = fit(_NO_HEAD, "--model.weights=w.pth", "--model.weights_of=backbone")
    yield Case("all but the head of a network without one", args, _FORMS["w.pth"])
