"""Every kind of case in turn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.bad_inputs import files, options, own_data, pretrained, private, runs
from tests.bad_inputs.judge import Case

KINDS: dict[str, Callable[[random.Random], Iterator[Case]]] = {
    "wrong value": options.wrong_values,
    "edge": options.edge_values,
    "wrong word": options.wrong_words,
    "own option": options.own_options,
    "configuration": files.broken_configurations,
    "arrays": files.broken_arrays,
    "texts": files.broken_texts,
    "clients' names": files.named_clients,
    "images": files.broken_folders,
    "image mode": own_data.image_modes,
    "lost image": own_data.lost_images,
    "scale": own_data.mixed_scales,
    "own client": own_data.dropped_clients,
    "federation": files.broken_federations,
    "study": runs.broken_studies,
    "privacy": private.private_runs,
    "adapter": pretrained.wrong_adapters,
}


def draw_cases(draw: random.Random, run: Path, kind: str = "") -> Iterator[tuple[str, Case]]:
    """Cases without end, a kind after the other, of which options have two.

    Args:
        draw: What they follow from.
        run: A folder with a run, of which copies are damaged.
        kind: Only the kinds whose names have this text.
    """
    of_runs = {"run": runs.broken_runs(run), "weights": pretrained.wrong_weights(run)}
    makers = KINDS | of_runs | {"wrong value again": options.wrong_values}
    streams = {name: make(random.Random(draw.random())) for name, make in makers.items() if kind in name}
    while True:
        for name, stream in streams.items():
            yield name.removesuffix(" again"), next(stream)
