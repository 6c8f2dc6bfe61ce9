"""Batches of persons with images in memory, on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from lit_fed.data.loaders.tensor_loader import draw_order, sizes
from lit_fed.data.pose.augmentation import PoseAugmentation


class PeopleLoader:
    """Batches of chosen persons for a `PoseView`; cheap enough to be made for every client.

    With a generator every iteration is a new shuffle: all random numbers of an epoch are drawn at once. Without a
    generator the order is that of `indices`.

    Args:
        canvases: Images of one size, uint8 (N, 3, h, w), on any device; never changed.
        people: The arrays of `People` by name, (N, …), on the CPU.
        indices: The persons to iterate over, int64 on the CPU, shape (n,).
        batch_size: Persons per batch; the last batch may be smaller.
        generator: A CPU generator to shuffle and augment with.
        augmentation: Draws boxes with the generator; None for the persons' own boxes.
        upper: Whether each joint belongs to the upper half, for the augmentation.
        aspect: Width of a picture divided by its height, for the augmentation.
        drop_last: Drop a smaller last batch, unless it is the only one.
        public: Replace the truth with positions in `indices`.
        fresh: Make every batch the first of a new shuffle, see `TensorLoader`.
    """

    def __init__(
        self,
        canvases: Tensor,
        people: Mapping[str, Tensor],
        indices: Tensor,
        batch_size: int,
        generator: torch.Generator | None = None,
        augmentation: PoseAugmentation | None = None,
        upper: tuple[bool, ...] = (),
        aspect: float = 0.75,
        drop_last: bool = False,
        public: bool = False,
        fresh: bool = False,
    ) -> None:
        self._canvases, self._people, self._indices = canvases, people, indices
        self._generator, self._augmentation = generator, augmentation
        self._upper, self._aspect, self._public, self._fresh = upper, aspect, public, fresh
        self.batch_size, self.num_samples = sizes(len(indices), batch_size, drop_last, fresh)

    def __len__(self) -> int:
        return -(-self.num_samples // self.batch_size)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Any]]:
        """One pass over the persons, in pairs of crops and truth."""
        if self.num_samples == 0:
            return
        generator, device = self._generator, self._canvases.device
        places = torch.arange(self.num_samples)
        if generator is not None:
            places = draw_order(len(self._indices), self.num_samples, self.batch_size, self._fresh, generator)
        chosen = self._indices[places]
        truth = {name: array[chosen] for name, array in self._people.items()}
        person = {"centre": truth.pop("centre"), "extent": truth.pop("extent")}
        if self._augmentation is not None:
            person = self._augmentation.draw(truth | person, self._upper, self._aspect, generator)
        else:
            person["origin"] = torch.zeros_like(person["centre"])
        # All but the images move once per epoch, so that no step waits for it.
        person, truth, chosen, places = move_data_to_device((person, truth, chosen, places), device)
        for start in range(0, self.num_samples, self.batch_size):
            part = slice(start, start + self.batch_size)
            seen = {name: array[part] for name, array in person.items()}
            seen["canvas"] = self._canvases.index_select(0, chosen[part])
            yield seen, places[part] if self._public else {name: array[part] for name, array in truth.items()}
