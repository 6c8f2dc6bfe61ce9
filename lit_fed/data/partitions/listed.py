"""A given partition: lists of samples, one per client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from lit_fed.data.partitions.csr import CSR, IntArray
from lit_fed.data.partitions.partition import Partition, Samples
from lit_fed.errors import ConfigError


class Listed(Partition):
    """Clients hold the training samples in their lists, by their numbers in the data set.

    Unlisted samples are unused. A public set and `max_train_samples` take samples out of the lists. Test samples are
    matched by class, see `Partition.split_test`.

    Args:
        clients: A list of sample numbers per client, or a JSON file with such lists: a list of them, a mapping from
            client ids 0, 1, … to them, or the ``partition.json`` of a run.

    Raises:
        ConfigError: The file is missing, or holds no such lists.
    """

    def __init__(self, clients: list[list[int]] | str) -> None:
        self.source = clients if isinstance(clients, str) else "partition.clients"
        lists = _read(Path(clients)) if isinstance(clients, str) else list(clients)
        if not lists:
            raise ConfigError(f"{self.source} names no client; give a list of sample numbers for each")
        self._lists = [_checked(numbers, client_id, self.source) for client_id, numbers in enumerate(lists)]

    @override
    def count(self, own: Any) -> int:
        return len(self._lists)

    @override
    def assign(self, samples: Samples, num_clients: int, seed: int) -> CSR:
        """Refuse lists that do not fit the samples.

        Raises:
            ConfigError: The number of lists differs, a sample number is out of range or repeated, or nothing of a list
                is left.
        """
        if num_clients != len(self._lists):
            raise ConfigError(
                f"{self.source} has lists for {len(self._lists)} clients, and data.num_clients is {num_clients}; "
                "leave the number out"
            )
        self._check(samples.size if samples.total is None else samples.total)
        numbers = np.arange(samples.size) if samples.numbers is None else samples.numbers
        wanted, sizes = np.concatenate(self._lists), np.array([len(one) for one in self._lists])
        owners = np.repeat(np.arange(num_clients), sizes)
        positions = np.searchsorted(numbers, wanted).clip(max=samples.size - 1)
        there = numbers[positions] == wanted
        csr = CSR.from_owners(positions[there], owners[there], num_clients)
        if len(empty := np.flatnonzero(csr.sizes == 0)):
            raise ConfigError(
                f"{self.source}: none of the {sizes[empty[0]]} samples of client {empty[0]} is left to train on; lower "
                "algorithm.public_size or raise data.max_train_samples"
            )
        return csr

    def _check(self, size: int) -> None:
        """Refuse sample numbers that are out of range or repeated."""
        wanted = np.concatenate(self._lists)
        owners = np.repeat(np.arange(len(self._lists)), [len(one) for one in self._lists])
        if len(wrong := np.flatnonzero((wanted < 0) | (wanted >= size))):
            raise ConfigError(
                f"{self.source}: client {owners[wrong[0]]} names sample {wanted[wrong[0]]}, and training samples are "
                f"numbered 0 to {size - 1}; correct it"
            )
        order = np.argsort(wanted, kind="stable")
        if len(twice := np.flatnonzero(np.diff(wanted[order]) == 0)):
            first, second = order[twice[0]], order[twice[0] + 1]
            raise ConfigError(
                f"{self.source}: sample {wanted[first]} is listed twice, for client {owners[first]} and for client "
                f"{owners[second]}; list it once"
            )

    def __repr__(self) -> str:
        return f"Listed({self.source!r}, {len(self._lists)} clients)"


def _read(path: Path) -> list[Any]:
    """The lists of a file, in client order."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"partition.clients: {path} cannot be read ({error.strerror}); name a JSON file") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"partition.clients: {path} is not JSON ({error}); list numbers per client") from error
    if isinstance(content, dict) and isinstance(content.get("clients"), dict):
        content = content["clients"]
    if isinstance(content, dict):
        if set(content) != {str(client_id) for client_id in range(len(content))}:
            odd = next(key for key in content if key not in {str(one) for one in range(len(content))})
            raise ConfigError(f"{path} has a client {odd!r}; number the {len(content)} clients from 0 on")
        content = [content[str(client_id)] for client_id in range(len(content))]
        content = [one.get("indices") if isinstance(one, dict) else one for one in content]
    if not isinstance(content, list):
        raise ConfigError(f"{path} holds no lists; give a list of sample numbers for each client")
    return content


def _checked(numbers: Any, client_id: int, source: str) -> IntArray:
    if not isinstance(numbers, list) or not numbers:
        raise ConfigError(f"{source}: client {client_id} has no list of samples; give it one number or more")
    array = np.asarray(numbers, dtype=object)
    if array.ndim != 1 or any(type(number) is not int or abs(number) >= 2**62 for number in numbers):
        raise ConfigError(f"{source}: the list of client {client_id} holds other values than whole numbers; correct it")
    return array.astype(np.int64)
