"""``lit-fed export``: write the trained network in files that need no lit_fed, with a model card."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from jsonargparse import ArgumentParser

from lit_fed.command.command import Call
from lit_fed.command.reading.own import add_overwrite
from lit_fed.engine.loop.checkpoint import find_checkpoint
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.handover.export import export_network
from lit_fed.load import NotRebuilt

_LOGS = Path("lightning_logs")
_FROM_PYTHON = "export it from Python: lit_fed.export_network(…, network=…)"


@dataclass(frozen=True)
class _Options:
    """Options of an export.

    Args:
        ckpt_path: best or last of the newest run here, a run's folder, or a file
        modules: your own modules, from which the checkpoint may import classes
        shape: shape of one input, without the batch, if the checkpoint does not say: [1,28,28]
        dtype: dtype of an input, with --shape
        onnx: write model.onnx; by default if the extra is installed
    """

    ckpt_path: str = "best"
    modules: list[str] = field(default_factory=list)
    shape: list[int] | None = None
    dtype: str = "float32"
    onnx: bool | None = None


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_class_arguments(_Options, as_group=False)
    parser.add_argument("-o", "--output", type=Path, default=Path("exported"), help="folder to write to")
    add_overwrite(parser, "an existing export")


def run(call: Call) -> int:
    """Write the files.

    Returns:
        The exit status: 1 if a program of the network could not be written.
    """
    options = call.settings
    path: Path | None = Path(options.ckpt_path)
    if options.ckpt_path in ("best", "last"):
        path = find_checkpoint(options.ckpt_path, _LOGS)
    if path is None:
        raise ConfigError(f"no run in {_LOGS} has a {options.ckpt_path}.ckpt; name a run's folder with --ckpt_path")
    stored = None if options.shape is None else (tuple(options.shape), options.dtype)
    try:
        done = export_network(
            path,
            options.output,
            modules=options.modules,
            stored=stored,
            onnx=options.onnx,
            overwrite=options.overwrite,
        )
    except NotRebuilt as error:
        allow = f"if you trust it, allow it with --modules '[{error.module}]'" if error.module else _FROM_PYTHON
        raise CheckpointError(f"{error.fault}; {allow}") from error
    for name in done.files:
        print(f"written     {done.folder / name}")
    for name, why in done.lacking.items():
        print(f"not written {done.folder / name}: {why}")
    failed = "model.pt2" in done.lacking or ("model.onnx" in done.lacking and options.onnx)
    return int(bool(failed))
