"""Write a trained network so that it needs no lit_fed: weights, a program for PyTorch, one for ONNX, and a card."""

from __future__ import annotations

import io
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule
from safetensors.torch import save
from torch import Tensor, nn

from lit_fed.engine.lightning.compatibility import overrides
from lit_fed.engine.loop.checkpoint import read_checkpoint
from lit_fed.engine.storage.files import files_in_place, refuse_overwriting
from lit_fed.errors import ConfigError, LitFedError, reason
from lit_fed.handover.card import card
from lit_fed.handover.facts import facts_of
from lit_fed.load import DeployedNetwork, checkpoint_file, load_network

FACTS = "model.json"
_LARGEST = 10**9  # numbers in an input
_FILES = ("model.safetensors", FACTS, "model.pt2", "model.onnx", "model.onnx.data", "MODEL_CARD.md")
_PT2 = """import torch
model = torch.export.load("model.pt2").module()
outputs = model(torch.zeros({sizes}, dtype=torch.{dtype}))"""
_ONNX = """import numpy, onnxruntime
model = onnxruntime.InferenceSession("model.onnx")
outputs = model.run(None, {{"inputs": numpy.zeros(({sizes}), numpy.{dtype})}})"""
_WEIGHTS = """from safetensors.torch import load_file
weights = load_file("model.safetensors")  # by the names of the network's own tensors"""


@dataclass(frozen=True)
class Exported:
    """What was written.

    Args:
        folder: Where.
        files: The files, by name.
        lacking: What could not be written and why, by name.
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

    ``model.safetensors`` has the weights, ``model.pt2`` the whole network, its preprocessing included, as
    ``torch.export`` takes it, for batches of any size, ``model.onnx`` the same for other runtimes, ``MODEL_CARD.md``
    what it is and ``model.json`` that for programs. Both programs are run, and compared with the network. Files take
    their places once all are written: an export before, which these would not go with, is whole until then.

    Args:
        ckpt_path: A checkpoint file, or a run folder (its ``best.ckpt``, else its ``last.ckpt``).
        output: The folder to write to; it is made.
        network: As for `load_network`.
        modules: As for `load_network`.
        stored: Shape, without the batch, and type of an input, such as ``((1, 28, 28), "uint8")``; None takes what the
            checkpoint says.
        onnx: Whether to write ``model.onnx``; None writes it where the packages for it are there.
        overwrite: Replace an export that is there.

    Raises:
        CheckpointError: As `load_network`, or if the files cannot be written.
        ConfigError: If a file is there already, nobody says what an input is like, or ONNX is asked for without its
            packages.
    """
    folder = Path(output)
    refuse_overwriting([folder / name for name in _FILES], overwrite)
    path = checkpoint_file(ckpt_path)
    content = read_checkpoint(path)
    absent = [package for package in ("onnx", "onnxscript") if find_spec(package) is None]
    if onnx and absent:
        raise ConfigError(f"export to ONNX needs {' and '.join(absent)}; install with pip install 'lit-fed[onnx]'")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of unknown preprocessing, which the card says
        deployed = load_network(path, network, modules)
    shape, dtype = stored or _stored(content["inputs"].get("stored"), path)
    example = _example(shape, dtype)
    facts = facts_of(content, path)
    told = json.dumps(
        asdict(facts) | {"input": {"shape": [None, *shape], "dtype": dtype}}, ensure_ascii=False, default=str
    )
    with files_in_place(folder, _FILES) as temporary:
        written, lacking = _write_programs(deployed, example, temporary, told, onnx, absent)
        sizes = {"sizes": ", ".join(map(str, (1, *shape))), "dtype": dtype}
        uses = {"model.pt2": _PT2.format(**sizes), "model.onnx": _ONNX.format(**sizes), "model.safetensors": _WEIGHTS}
        text = card(facts, [use for name, use in uses.items() if name in written], (shape, dtype))
        (temporary / "MODEL_CARD.md").write_text(text, encoding="utf-8")
    return Exported(folder, (*written, "MODEL_CARD.md"), lacking)


def _write_programs(
    deployed: DeployedNetwork, example: Tensor, folder: Path, told: str, onnx: bool | None, absent: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Write weights, facts and what programs of the network can be made; what was written, and what was not and why."""
    _write_weights(deployed, folder / "model.safetensors", told)
    (folder / FACTS).write_text(told + "\n", encoding="utf-8")
    lacking: dict[str, str] = {}
    written = ["model.safetensors", FACTS]
    program = _attempt(
        lambda: _write_pt2(deployed, example, folder / "model.pt2", told), folder, "model.pt2", written, lacking
    )
    if program is None:
        lacking["model.onnx"] = "it is made from model.pt2"
    elif onnx or (onnx is None and not absent):
        _attempt(
            lambda: _write_onnx(program, deployed, example, folder / "model.onnx"),
            folder,
            "model.onnx",
            written,
            lacking,
        )
    elif onnx is None:
        lacking["model.onnx"] = f"{' and '.join(absent)} not installed; pip install 'lit-fed[onnx]'"
    return written, lacking


def _stored(found: Any, path: Path) -> tuple[tuple[int, ...], str]:
    """What a checkpoint says that an input is like."""
    if not isinstance(found, tuple) or len(found) != 2:
        raise ConfigError(
            f"{path} does not say what an input is like; give --shape and --dtype, such as [1,28,28] uint8"
        )
    return tuple(found[0]), str(found[1])


def _example(shape: tuple[int, ...], dtype: str) -> Tensor:
    """Three inputs: a size that no axis of a network has by chance."""
    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype):
        raise ConfigError(f"there is no type {dtype!r} of inputs; name one of torch's, such as uint8 or float32")
    if not all(type(size) is int and 0 < size < _LARGEST for size in shape) or math.prod(shape) > _LARGEST:
        raise ConfigError(f"no input has the shape {list(shape)}; give the sizes of one, without the batch")
    generator = torch.Generator().manual_seed(0)
    if kind.is_floating_point:
        return torch.rand(3, *shape, generator=generator, dtype=torch.float32).to(kind)
    return torch.randint(0, 2, (3, *shape), generator=generator).to(kind)


def _attempt(write: Any, folder: Path, name: str, written: list[str], lacking: dict[str, str]) -> Any:
    """What a step makes; None, and why, where the network is not made for it.

    Raises:
        OSError: If it cannot be written, whatever the network.
    """
    try:
        made = write()
    except OSError:
        raise
    except Exception as error:  # whatever the network's code does with a tracer, beside the exporters' own
        lacking[name] = str(error) if isinstance(error, LitFedError) else reason(error)
        (folder / name).unlink(missing_ok=True)
        return None
    written.append(name)
    return made


def _write_weights(deployed: DeployedNetwork, path: Path, told: str) -> None:
    """The network's tensors and what is known of it; tensors that share memory are written once each."""
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in deployed.network.state_dict().items()}
    path.write_bytes(save(tensors, metadata={"format": "pt", "lit_fed": told}))


def _write_pt2(deployed: DeployedNetwork, example: Tensor, path: Path, told: str) -> torch.export.ExportedProgram:
    network = deployed.network
    if isinstance(network, LightningModule) and not overrides(network, "forward"):
        raise ConfigError(f"{type(network).__name__} has no forward(x), which is what would be written")
    batch = torch.export.Dim("batch", min=1)
    with torch.no_grad():
        program = torch.export.export(deployed, (example,), dynamic_shapes=({0: batch},))
        content = io.BytesIO()  # of a file that cannot be written, torch says what it says of one that cannot be made
        torch.export.save(program, content, extra_files={FACTS: told})
        path.write_bytes(content.getvalue())
        again = torch.export.load(path).module()
        for some in (example, example[:2]):
            torch.testing.assert_close(again(some), deployed(some), rtol=1e-4, atol=1e-5)
    return program


def _write_onnx(program: torch.export.ExportedProgram, deployed: DeployedNetwork, example: Tensor, path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter's own parts
        made = torch.onnx.export(program, (example,), input_names=["inputs"], verbose=False)
    assert made is not None
    made.save(path)
    if find_spec("onnxruntime") is not None:
        import onnxruntime

        session = onnxruntime.InferenceSession(path)
        for some in (example, example[:2]):
            (found, *_) = session.run(None, {"inputs": some.numpy()})
            with torch.no_grad():
                torch.testing.assert_close(torch.from_numpy(found), deployed(some), rtol=1e-3, atol=1e-4)
