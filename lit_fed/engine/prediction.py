"""Write what the global model, or one client's, predicts to a file."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lit_fed.engine.federation import Federation
from lit_fed.engine.session import Broadcast
from lit_fed.errors import ConfigError


def write_predictions(
    federation: Federation, output: Path, client_id: int | None, round_idx: int, broadcast: Broadcast | None = None
) -> Path:
    """Run ``predict_step`` over test data and write every output.

    Args:
        federation: With a trained state loaded.
        output: ``.csv`` (a row a sample; a tensor of several values takes several columns) or ``.npz``. Where the data
            have labels, ``label`` is the last column.
        client_id: Predict as this client on its own test data; None for the global model on the shared test set.
        round_idx: The last finished round.
        broadcast: What the client has received; what the server here sends, where it is not given.

    Returns:
        The file written.

    Raises:
        ConfigError: For another file type, an unknown client, or a method without a global model.
    """
    if output.suffix not in (".csv", ".npz"):
        raise ConfigError(f"predictions go to a .csv or .npz file, not {output.name!r}; change --output")
    batches: dict[str, list[np.ndarray]] = {}
    for batch, result in _predictions(federation, client_id, round_idx, broadcast):
        for name, value in (_named(result) | _label(batch)).items():
            batches.setdefault(name, []).append(_array(value))
    if not batches:
        raise ConfigError(
            "there is no test data to predict on" + ("" if client_id is None else f" for client {client_id}")
        )
    columns = {name: np.concatenate(parts) for name, parts in batches.items()}
    if federation.fabric.is_global_zero:
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            if output.suffix == ".npz":
                np.savez(output, **columns)  # type: ignore[arg-type]  # numpy takes the arrays for its allow_pickle
            else:
                _write_csv(output, columns)
        except OSError as error:
            raise ConfigError(f"cannot write {output}: {error.strerror}; change --output") from error
        federation.fabric.print(f"wrote predictions for {len(next(iter(columns.values())))} samples to {output}")
    return output


def _predictions(
    federation: Federation, client_id: int | None, round_idx: int, broadcast: Broadcast | None
) -> Iterator[tuple[Any, Any]]:
    """Batches of test data with what the global model, or a client, predicts for them."""
    data = federation.data
    if client_id is None:
        models = federation.global_models(round_idx)
        if not models:
            raise ConfigError("this method has no global model; name a client with --client_id")
        if len(models) > 1:
            raise ConfigError(
                f"each of the kinds {', '.join(models)} has a global model; name a client with --client_id"
            )
        ((kind, state),) = models.items()
        loop = federation.loops[kind]
        loop.model.load(state)
        yield from loop.predict(data.test_loader())
        return
    if not 0 <= client_id < data.num_clients:
        raise ConfigError(f"there is no client {client_id}; clients are 0 to {data.num_clients - 1}")
    session = federation.session
    client = session.enter(client_id, broadcast or federation.broadcast(round_idx, "predict"), "predict")
    with session.prepared(client):
        yield from session.predict(client, data.test_loader(client_id))


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
    raise ConfigError(f"predict_step must return a tensor or a dict of tensors, not {type(result).__name__}")


def _write_csv(output: Path, columns: Mapping[str, np.ndarray]) -> None:
    header, flat = ["index"], []
    for name, values in columns.items():
        matrix = values.reshape(len(values), -1)
        header += [name] if matrix.shape[1] == 1 else [f"{name}_{column}" for column in range(matrix.shape[1])]
        flat.append(matrix)
    with open(output, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        for index, row in enumerate(np.concatenate(flat, axis=1).astype(np.float64).tolist()):
            writer.writerow([index, *(int(value) if value.is_integer() else value for value in row)])
