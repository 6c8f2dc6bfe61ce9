"""Export a trained network without lit_fed: weights, a program for PyTorch, one for ONNX, and a model card."""

from __future__ import annotations

import io
import json
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from lightning import LightningModule
from safetensors.torch import save
from torch import Tensor, nn
from torch.export import ExportedProgram

from lit_fed.engine.lightning.compatibility import overrides
from lit_fed.engine.loop.checkpoint import read_checkpoint
from lit_fed.engine.storage.files import files_in_place, refuse_overwriting
from lit_fed.errors import ConfigError, LitFedError, reason
from lit_fed.handover.adapters import CONFIG, USE, WEIGHTS, peft_files
from lit_fed.handover.card import Inputs, card, facts_of
from lit_fed.load import DeployedNetwork, checkpoint_file, load_network
from lit_fed.networks.adapters import LoRALinear, LoRAWeight, merge_adapters

T = TypeVar("T")

FACTS = "model.json"
_APART, _MOST_APART = 0.01, 0.1  # pixels between two places of a joint; share of joints
_LARGEST = 10**9  # numbers in an input
_SEQUENCE_AXES = 3  # batch, length and channels; images have more, whose size is the data's
_FILES = ("model.safetensors", FACTS, "model.pt2", "model.onnx", "model.onnx.data", "MODEL_CARD.md", CONFIG, WEIGHTS)
_PT2 = """import torch
model = torch.export.load("model.pt2").module()
outputs = model(torch.zeros({sizes}, dtype=torch.{dtype}))"""
_ONNX = """import numpy, onnxruntime
model = onnxruntime.InferenceSession("model.onnx")
outputs = model.run(None, {{"inputs": numpy.zeros(({sizes}), numpy.{dtype})}})"""
_PT2_JOINTS = """import json, torch
from matplotlib import pyplot
from torchvision.io import decode_image
told = {{"model.json": ""}}
model = torch.export.load("model.pt2", extra_files=told).module()
facts = json.loads(told["model.json"])
picture = decode_image("person.jpg", mode="RGB", apply_exif_orientation=True)  # (3, H, W) of one person
found = model(picture[None])  # "keypoints" in pixels (x, y), and "score"
pyplot.imshow(picture.permute(1, 2, 0))
for one, other in facts["edges"]:
    pyplot.plot(*found["keypoints"][0, [one, other]].detach().T, label=facts["joints"][one])
pyplot.savefig("skeleton.png")"""
_ONNX_JOINTS = """import json, numpy, onnxruntime
model = onnxruntime.InferenceSession("model.onnx")
keypoints, score = model.run(None, {{"inputs": numpy.zeros(({sizes}), numpy.{dtype})}})
joints = json.loads(model.get_modelmeta().custom_metadata_map["lit_fed"])["joints"]"""
_WEIGHTS = """from safetensors.torch import load_file
weights = load_file("model.safetensors")  # by the names of the network's own tensors"""


@dataclass(frozen=True)
class Exported:
    """The files of an export.

    Args:
        folder: Their folder.
        files: Their names.
        lacking: By name, why a file was not written.
    """

    folder: Path
    files: tuple[str, ...]
    lacking: dict[str, str]


def export_network(
    ckpt_path: str | Path,
    output: str | Path,
    network: nn.Module | None = None,
    modules: Sequence[str] = (),
    stored: tuple[tuple[int, ...], str] | None = None,
    onnx: bool | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write the trained global network of a checkpoint for use without lit_fed.

    ``model.safetensors`` holds the weights, ``model.pt2`` the network with its preprocessing for ``torch.export``,
    ``model.onnx`` the same for other runtimes, ``MODEL_CARD.md`` a description and ``model.json`` the same for
    programs. Adapters are in the weights, and ``adapter_model.safetensors`` and ``adapter_config.json`` hold them for
    peft. Batches have any size. Sequences, which are inputs of one or two axes, have any length that the network takes;
    the card states it. Both programs run once and are compared with the network. The new files replace an older export
    together, after the last one is written.

    Args:
        ckpt_path: A checkpoint file, or a run folder (its ``best.ckpt``, else its ``last.ckpt``).
        output: The folder to write to; it is created.
        network: As for `load_network`.
        modules: As for `load_network`.
        stored: Shape, without the batch, and type of an input, such as ``((1, 28, 28), "uint8")``; None takes the
            checkpoint's.
        onnx: Whether to write ``model.onnx``; None writes it where its packages are installed.
        overwrite: Replace an existing export.

    Raises:
        CheckpointError: As `load_network`, or if the files cannot be written.
        ConfigError: If a file exists, the input's shape is unknown, or packages for ``onnx=True`` are missing.
    """
    folder = Path(output)
    refuse_overwriting([folder / name for name in _FILES], overwrite)
    path = checkpoint_file(ckpt_path)
    content = read_checkpoint(path)
    absent = [package for package in ("onnx", "onnxscript") if find_spec(package) is None]
    if onnx and absent:
        raise ConfigError(f"export to ONNX needs {' and '.join(absent)}; install with pip install 'lit-fed[onnx]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about unknown preprocessing, which the card states
        deployed = load_network(path, network, modules)
    shape, dtype = stored or _stored(content["inputs"].get("stored"), path)
    example, lacking, written = _example(shape, dtype), dict[str, str](), ["model.safetensors", FACTS]
    adapters: dict[str, bytes] | None = {}
    if any(isinstance(module, LoRALinear | LoRAWeight) for module in deployed.network.modules()):
        adapters = _attempt(lambda: peft_files(deployed.network), WEIGHTS, lacking)
        deployed.network = merge_adapters(deployed.network)
    program = _attempt(lambda: _program(deployed, example), "model.pt2", lacking)
    free = {} if program is None else _free_axes(program)
    facts = facts_of(content, path)
    sizes = [None, *(None if axis in free else size for axis, size in enumerate(shape, 1))]
    more: dict[str, Any] = getattr(deployed.outputs, "facts", {})
    facts_text = json.dumps(
        asdict(facts) | more | {"input": {"shape": sizes, "dtype": dtype}}, ensure_ascii=False, default=str
    )
    with files_in_place(folder, _FILES) as temporary:
        (temporary / "model.safetensors").write_bytes(_weights(deployed, facts_text))
        (temporary / FACTS).write_text(facts_text + "\n", encoding="utf-8")
        for name, file in (adapters or {}).items():
            (temporary / name).write_bytes(file)
            written.append(name)
        writers = {"model.pt2": _write_pt2, "model.onnx": _write_onnx}
        if onnx is False or (onnx is None and absent):
            del writers["model.onnx"]
            if onnx is None:
                lacking["model.onnx"] = f"{' and '.join(absent)} not installed; pip install 'lit-fed[onnx]'"
        batches = _other_sizes(example, free)
        for name, write in writers.items():
            if program is None:
                break
            if _attempt(partial(write, program, deployed, batches, temporary / name, facts_text), name, lacking):
                written.append(name)
            else:
                (temporary / name).unlink(missing_ok=True)
                break
        if "model.pt2" in lacking and onnx is not False:
            lacking["model.onnx"] = "it is made from model.pt2"
        words = {"sizes": ", ".join(map(str, (1, *shape))), "dtype": dtype}
        pt2, onnx_use = (_PT2_JOINTS, _ONNX_JOINTS) if more.get("joints") else (_PT2, _ONNX)
        uses = {
            "model.pt2": pt2.format(**words),
            "model.onnx": onnx_use.format(**words),
            "model.safetensors": _WEIGHTS,
            WEIGHTS: USE,
        }
        inputs = Inputs(shape, dtype, free, more.get("joints") or (), getattr(deployed.outputs, "cell", 1))
        text = card(facts, [use for name, use in uses.items() if name in written], inputs)
        (temporary / "MODEL_CARD.md").write_text(text, encoding="utf-8")
    return Exported(folder, (*written, "MODEL_CARD.md"), lacking)


def _stored(stored: Any, path: Path) -> tuple[tuple[int, ...], str]:
    """Shape and type of an input as a checkpoint holds them."""
    if not isinstance(stored, tuple) or len(stored) != 2:
        raise ConfigError(
            f"{path} does not describe the inputs; give the shape of one without the batch, and its type: "
            "--shape '[1,28,28]' --dtype uint8, in Python stored=((1, 28, 28), 'uint8')"
        )
    return tuple(stored[0]), str(stored[1])


def _example(shape: tuple[int, ...], dtype: str) -> Tensor:
    """A batch of three inputs: a size that no axis of a network is likely to have."""
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ConfigError(f"--dtype is {dtype!r}; it must be a type of torch, such as uint8 or float32")
    if not all(type(size) is int and 0 < size < _LARGEST for size in shape) or math.prod(shape) > _LARGEST:
        raise ConfigError(f"--shape is {list(shape)}; it must hold the sizes of one input, without the batch")
    generator = torch.Generator().manual_seed(0)
    if kind.is_floating_point:
        return torch.rand(3, *shape, generator=generator, dtype=torch.float32).to(kind)
    most = 256 if kind == torch.uint8 and len(shape) == 3 else 2  # of images, so that places differ
    return torch.randint(0, most, (3, *shape), generator=generator).to(kind)


def _attempt(step: Callable[[], T], name: str, lacking: dict[str, str]) -> T | None:
    """The result of a step; None, and the cause in `lacking`, where the network does not allow it.

    Raises:
        OSError: If a file cannot be written.
    """
    try:
        return step()
    except OSError:
        raise
    except Exception as error:  # of the network's own code under a tracer, and of the exporters
        lacking[name] = str(error) if isinstance(error, LitFedError) else reason(error)
        return None


def _weights(deployed: DeployedNetwork, facts: str) -> bytes:
    """The network's tensors and the facts; tensors that share memory are stored once each."""
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in deployed.network.state_dict().items()}
    return save(tensors, metadata={"format": "pt", "lit_fed": facts})


def _program(deployed: DeployedNetwork, example: Tensor) -> ExportedProgram:
    """The network for batches of any size, and sequences of any length that it takes."""
    network = deployed.network
    if isinstance(network, LightningModule) and not overrides(network, "forward"):
        raise ConfigError(f"{type(network).__name__} has no forward(x) to export; add one")
    batch = torch.export.Dim("batch", min=1)
    sizes: dict[int, Any] = {0: batch}
    if (cell := getattr(deployed.outputs, "cell", None)) is not None:  # it takes pictures of any size
        free = sizes | {2 + axis: torch.export.Dim(name, min=2 * cell) for axis, name in enumerate(("rows", "columns"))}
        with suppress(Exception), torch.no_grad():  # of the network's own code, which may fix the size
            return torch.export.export(deployed, (example,), dynamic_shapes=(free,))
    if example.ndim <= _SEQUENCE_AXES:
        sizes |= dict.fromkeys(range(1, example.ndim), torch.export.Dim.AUTO)  # free where the network leaves it so
    with torch.no_grad():
        return torch.export.export(deployed, (example,), dynamic_shapes=(sizes,))


def _free_axes(program: ExportedProgram) -> dict[int, tuple[int, int | None]]:
    """By axis of the inputs, beside the batch, the least and the largest size; None for no largest."""
    (name,) = program.graph_signature.user_inputs
    (inputs,) = [node for node in program.graph.nodes if node.op == "placeholder" and node.name == name]
    axes = {}
    for axis, size in enumerate(inputs.meta["val"].shape):
        allowed = program.range_constraints.get(size.node.expr) if isinstance(size, torch.SymInt) else None
        if axis and allowed is not None:
            axes[axis] = int(allowed.lower), int(allowed.upper) if allowed.upper.is_Integer else None
    return axes


def _other_sizes(example: Tensor, free: Mapping[int, tuple[int, int | None]]) -> list[Tensor]:
    """Batches to compare a program with its network: of two sizes, and with every free axis shorter."""
    batches = [example, example[:2]]
    for axis, (least, _) in free.items():
        batches.append(example.narrow(axis, 0, max(least, example.shape[axis] // 2 - 1)))
    return batches


def _check_equal(found: Any, wanted: Any, rtol: float, atol: float) -> None:
    """Compare a program's outputs with the network's.

    Joints stand at the largest value of a heatmap, and one in ten may stand elsewhere, as rounding decides between two
    equal values.

    Raises:
        AssertionError: They differ.
    """
    if not isinstance(wanted, dict) or "keypoints" not in wanted:
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol)
        return
    torch.testing.assert_close(found["score"], wanted["score"], rtol=rtol, atol=atol)
    apart = (found["keypoints"] - wanted["keypoints"]).abs().amax(-1) > _APART
    assert apart.float().mean() <= _MOST_APART, "the joints differ"


def _write_pt2(
    program: ExportedProgram, deployed: DeployedNetwork, batches: Sequence[Tensor], path: Path, facts: str
) -> bool:
    content = io.BytesIO()  # torch reports an unwritable file as a network that cannot be exported
    torch.export.save(program, content, extra_files={FACTS: facts})
    path.write_bytes(content.getvalue())
    again = torch.export.load(path).module()
    with torch.no_grad():
        for batch in batches:
            _check_equal(again(batch), deployed(batch), rtol=1e-4, atol=1e-5)
    return True


def _write_onnx(
    program: ExportedProgram, deployed: DeployedNetwork, batches: Sequence[Tensor], path: Path, facts: str
) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's own parts
        with torch.no_grad():
            wanted = deployed(batches[0])
        names = list(wanted) if isinstance(wanted, dict) else None
        made = torch.onnx.export(program, (batches[0],), input_names=["inputs"], output_names=names, verbose=False)
    assert made is not None
    made.model.metadata_props["lit_fed"] = facts
    made.save(path)
    if find_spec("onnxruntime") is not None:
        import onnxruntime

        session = onnxruntime.InferenceSession(path)
        for batch in batches:
            outputs = list(map(torch.from_numpy, session.run(None, {"inputs": batch.numpy()})))
            with torch.no_grad():
                _check_equal(
                    dict(zip(names, outputs, strict=True)) if names else outputs[0], deployed(batch), 1e-3, 1e-4
                )
    return True
