"""Write predictions of the global model, or of a client, to a file."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_fed.checks import check_local
from lit_fed.data.loaders.tensor_loader import Loader
from lit_fed.data.population.base import FederatedDataModule
from lit_fed.data.population.files import NewInputs, Records, write_archive
from lit_fed.data.population.naming import Keys, called, clients_of
from lit_fed.data.population.views import View, viewed
from lit_fed.engine.evaluation.federation import Federation
from lit_fed.engine.storage.files import in_place_of, refuse_overwriting
from lit_fed.engine.wire.payload import Broadcast
from lit_fed.errors import CheckpointError, ConfigError, LitFedError, own_traceback, reason
from lit_fed.tensors import map_tensors

KEYS = Keys("--client", "--client_position")


def check_output(output: Path, overwrite: bool) -> None:
    """Refuse, before any prediction, a URL, another file type, or an existing file without ``overwrite``."""
    check_local("--output", output)
    if output.suffix not in (".csv", ".npz", ".json"):
        raise ConfigError(f"--output is {output.name!r}; it must be a .csv, .npz or .json file")
    refuse_overwriting([output, *_beside(output)], overwrite)


def _beside(output: Path) -> list[Path]:
    """The picture beside a file of records."""
    return [output.with_suffix(".png")] if output.suffix == ".json" else []


def one_client(data: FederatedDataModule, name: str | None, position: int | None) -> int | None:
    """The position of the client given by name or position; None without either."""
    if name is not None and position is not None:
        raise ConfigError(f"{KEYS.name} and {KEYS.position} are both given; give one of them")
    positions = clients_of(data, KEYS, None if name is None else [name], None if position is None else [position])
    return None if positions is None else positions[0]


def write_predictions(
    federation: Federation,
    output: Path | None,
    client_id: int | None,
    round_idx: int,
    broadcast: Broadcast | None = None,
    inputs: Path | None = None,
) -> list[Any]:
    """Run ``predict_step`` over test data, or over inputs of another file, and write every output.

    Args:
        federation: With a trained state loaded.
        output: A file accepted by `check_output`, replaced when all is written: ``.csv`` (a row per sample; a tensor of
            several values takes several columns) or ``.npz``. Labels come last as ``label``; class names follow in
            columns of their own, and name the columns of scores; the file of each sample comes first as ``file``. Data
            with records of their own, see `FederatedDataModule.records`, write these to ``.csv``, and to ``.json`` with
            a picture beside it. None for no file.
        client_id: Predict as the client at this position on its own test data; None for the global model on the shared
            test set.
        round_idx: The last finished round.
        broadcast: The client's last broadcast; None for this server's.
        inputs: Predict on these instead of test data, see `FederatedDataModule.new_inputs`.

    Returns:
        The outputs by batch.
    """
    data = federation.data
    if output is not None and output.suffix == ".json" and type(data).records is FederatedDataModule.records:
        raise ConfigError(f"--output is {output.name!r}, and {type(data).__name__} writes .csv and .npz; choose one")
    new = None if inputs is None else data.new_inputs(inputs)
    batches: dict[str, list[np.ndarray]] = {}
    results = []
    for batch, result in _predictions(federation, client_id, round_idx, broadcast, new):
        results.append(map_tensors(result, torch.Tensor.cpu))
        for name, value in (_named(results[-1]) | _label(batch)).items():
            batches.setdefault(name, []).append(_array(value))
    if not batches:
        raise ConfigError(
            "there is no test data to predict on"
            + ("" if client_id is None else f" for client {called(data, client_id)}")
        )
    columns = {name: np.concatenate(parts) for name, parts in batches.items()}
    _check(columns)
    if output is None:
        return results
    names = _telling(data.class_names)
    files = None if new is None else new.files
    records = None if output.suffix == ".npz" else data.records(columns, new)
    if output.suffix == ".json" and records is None:
        raise ConfigError(
            f"--output is {output.name!r}, and {type(data).__name__} makes no records of the outputs of predict_step, "
            f"{', '.join(columns)}; choose a .csv or .npz file"
        )
    if federation.fabric.is_global_zero:
        try:
            with in_place_of(output.resolve()) as temporary:  # the target of a link
                if output.suffix == ".npz":
                    texts = {"file": files, "class_names": names}
                    columns |= {name: np.array(text) for name, text in texts.items() if text is not None}
                    write_archive(temporary, columns)
                elif records is not None:
                    _write_records(temporary, output.suffix, records)
                else:
                    _write_csv(temporary, columns, names, files)
            for picture in _beside(output.resolve()):
                assert records is not None
                with in_place_of(picture) as temporary:
                    records.picture().savefig(temporary, format="png")
        except CheckpointError as error:
            raise ConfigError(f"{error}; change --output") from error
        federation.fabric.print(f"wrote predictions for {len(next(iter(columns.values())))} samples to {output}")
    return results


def _check(columns: Mapping[str, np.ndarray]) -> None:
    """Refuse NaN predictions: their class would be the first one."""
    for name, values in columns.items():
        if values.dtype.kind == "f" and len(odd := np.isnan(values.reshape(len(values), -1)).any(axis=1).nonzero()[0]):
            raise ConfigError(
                f"{name} is NaN for sample {odd[0]}; the inputs are too large for the network, or its weights are not "
                "finite"
            )


def _predictions(
    federation: Federation,
    client_id: int | None,
    round_idx: int,
    broadcast: Broadcast | None,
    new: NewInputs | None,
) -> Iterator[tuple[Any, Any]]:
    """Batches with the predictions of the global model, or of a client."""
    data = federation.data
    if client_id is None:
        models = federation.global_models(round_idx)
        if not models:
            raise ConfigError(f"this method has no global model; name a client with {KEYS.name}")
        if len(models) > 1:
            raise ConfigError(
                f"each of the kinds {', '.join(models)} has a global model; name a client with {KEYS.name}"
            )
        ((kind, state),) = models.items()
        loop = federation.loops[kind]
        loop.model.load(state)
        whole = data.predict_dataloader
        yield from _seen_through(new, data.seen(None), loop.predict) if new else loop.predict(whole())
        return
    session = federation.session
    client = session.enter(client_id, broadcast or federation.broadcast(round_idx, "predict"), "predict")
    with session.prepared(client):
        predict = partial(session.predict, client)
        yield from _seen_through(new, data.seen(client_id), predict) if new else predict(data.test_loader(client_id))


def _seen_through(
    new: NewInputs, view: View | None, predict: Callable[[Loader], Iterator[tuple[Any, Any]]]
) -> Iterator[tuple[Any, Any]]:
    """Predictions on inputs through a view; a `ConfigError` if the task needs targets that they lack."""
    try:
        yield from predict(viewed(new.loader, view))
    except LitFedError:
        raise
    except Exception as error:  # whatever a task's own code raises
        raise ConfigError(
            f"predict_step cannot take these inputs ({reason(error)}); without targets a batch is x alone",
            own_traceback(error),
        ) from error


def _telling(names: list[str] | None) -> list[str] | None:
    """Names of classes; None if they only count."""
    return None if names is None or names == [str(number) for number in range(len(names))] else names


def _array(tensor: Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()  # NumPy has no bfloat16


def _label(batch: Any) -> dict[str, Tensor]:
    """The true labels of an (x, y) batch, to compare the predictions with."""
    labelled = isinstance(batch, tuple | list) and len(batch) == 2 and isinstance(batch[1], Tensor)
    return {"label": batch[1]} if labelled and batch[1].ndim == 1 else {}


def _named(result: Any) -> dict[str, Tensor]:
    if isinstance(result, Mapping):
        return dict(result)
    if isinstance(result, Tensor):
        return {"output": result}
    raise ConfigError(f"predict_step returned a {type(result).__name__}; it must return a tensor or a dict of tensors")


def _write_csv(
    output: Path, columns: Mapping[str, np.ndarray], names: list[str] | None, files: list[str] | None
) -> None:
    count = len(next(iter(columns.values())))
    header = ["index"] if files is None else ["index", "file"]
    first = [[index] if files is None else [index, files[index]] for index in range(count)]
    flat, texts = list[np.ndarray](), dict[str, list[str]]()
    for name, values in columns.items():
        matrix = values.reshape(len(values), -1)
        is_score = names is not None and values.ndim == 2 and values.dtype.kind == "f" and values.shape[1] == len(names)
        ends = names if is_score and names is not None else [str(column) for column in range(matrix.shape[1])]
        header += [name] if matrix.shape[1] == 1 else [f"{name}_{end}" for end in ends]
        flat.append(matrix)
        if names is not None and _are_classes(values, len(names)):
            texts[f"{name}_name"] = [names[value] for value in values.tolist()]
    with open(output, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*header, *texts])
        for index, row in enumerate(np.concatenate(flat, axis=1).astype(np.float64).tolist()):
            numbers = (int(value) if value.is_integer() else value for value in row)
            writer.writerow([*first[index], *numbers, *(text[index] for text in texts.values())])


def _write_records(path: Path, kind: str, records: Records) -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        if kind == ".json":
            json.dump(records.document, file)
            file.write("\n")
            return
        writer = csv.DictWriter(file, list(records.rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(records.rows)


def _are_classes(values: np.ndarray, count: int) -> bool:
    """Whether an output is a class per sample."""
    is_whole = values.ndim == 1 and values.dtype.kind in "iu" and len(values) > 0
    return bool(is_whole and values.min() >= 0 and values.max() < count)
