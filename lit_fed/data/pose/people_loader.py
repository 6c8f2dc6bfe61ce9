"""Batches of persons whose images live in memory, on the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor

from lit_fed.data.pose.augmentation import PoseAugmentation


class PeopleLoader:
    """Iterates over chosen persons in batches for a `PoseView`; cheap enough to be made anew for every client.

    With a generator every iteration is shuffled, and augmented where it trains: all random numbers of an epoch are
    drawn at once. Without one the order is that of `indices`.

    Args:
        canvases: Images, all of one size, uint8 (N, 3, h, w), on any device; never changed.
        people: The arrays of `People` by name, (N, …), on the CPU.
        indices: Whom to iterate over, int64 on the CPU, shape (n,).
        batch_size: Persons per batch; the last batch may be smaller.
        generator: A CPU generator to shuffle and augment with.
        augmentation: Draws boxes with the generator; None takes everybody's own.
        upper: Which joints are of the upper half, for the augmentation.
        aspect: Width of a picture divided by its height, for the augmentation.
        drop_last: Leave out the last batch where it is smaller than the others, unless it is the only one.
        public: Give positions in `indices` in place of the truth.
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
    ) -> None:
        self._canvases, self._people, self._indices = canvases, people, indices
        self._generator, self._augmentation = generator, augmentation
        self._upper, self._aspect, self._public = upper, aspect, public
        self.batch_size = batch_size
        count = len(indices)
        self.num_samples = count - count % batch_size if drop_last and count > batch_size else count

    def __len__(self) -> int:
        return -(-self.num_samples // self.batch_size)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Any]]:
        """One pass over the persons, in pairs of what is seen and what is true."""
        if self.num_samples == 0:
            return
        generator, device = self._generator, self._canvases.device
        places = torch.arange(len(self._indices))
        if generator is not None:
            places = torch.randperm(len(self._indices), generator=generator)
        places = places[: self.num_samples]
        chosen = self._indices[places]
        truth = {name: array[chosen] for name, array in self._people.items()}
        person = {"centre": truth.pop("centre"), "extent": truth.pop("extent")}
        if self._augmentation is not None:
            person = self._augmentation.draw(truth | person, self._upper, self._aspect, generator)
        else:
            person["origin"] = torch.zeros_like(person["centre"])
        # Everything but the images is moved once an epoch, so that no step waits for it.
        person, truth, chosen, places = move_data_to_device((person, truth, chosen, places), device)
        for start in range(0, self.num_samples, self.batch_size):
            part = slice(start, start + self.batch_size)
            seen = {name: array[part] for name, array in person.items()}
            seen["canvas"] = self._canvases.index_select(0, chosen[part])
            yield seen, places[part] if self._public else {name: array[part] for name, array in truth.items()}
