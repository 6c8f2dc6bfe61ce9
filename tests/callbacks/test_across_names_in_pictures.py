"""Names of classes and clients in pictures: there, whole or visibly cut, and none over another."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from lit_fed.callbacks.pictures import predictions_picture
from lit_fed.data.population.pictures import Names, partition_picture, sizes_picture, target_picture

WORDS = ("aquarium fish", "wwwwwwwwwwwwwwwwwwwwwwww", "cra$y_$fish", "t", "European fire\nsalamander, Salamandra")


def named(count: int) -> list[str]:
    return [f"{WORDS[i % 5]} {i}" if i % 3 else f"{i} {WORDS[i % 5]}" for i in range(count)]


def none_collide(figure: Any, texts: list[Any]) -> None:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    width, height = canvas.get_width_height()
    boxes = [text.get_window_extent(canvas.get_renderer()) for text in texts if text.get_text().strip()]
    assert boxes
    for first, second in combinations(boxes, 2):
        assert not first.overlaps(second)
    for box in boxes:
        assert box.x0 >= 0
        assert box.y0 >= 0
        assert box.x1 <= width
        assert box.y1 <= height


@pytest.mark.parametrize(
    ("num_classes", "has_names", "count"), [(20, True, 16), (200, True, 16), (200, False, 16), (20, True, 1)]
)
def test_predictions_have_names_that_do_not_collide(num_classes: int, has_names: bool, count: int) -> None:
    rng = np.random.default_rng(0)
    images = rng.random((count, 3, 8, 8)).astype(np.float32)
    true, predicted = rng.integers(num_classes, size=(2, count)).tolist()
    names = named(num_classes) if has_names else None
    figure = predictions_picture(images, predicted, true, names)
    titles = [axes.title for axes in figure.axes]
    none_collide(figure, titles)
    for title, guess, label in zip(titles, predicted, true, strict=False):
        word = str(guess) if names is None else names[guess].split()[0][:16]
        assert title.get_text().strip().startswith(word)
        assert ("\nnot " in title.get_text()) == (guess != label)


@pytest.mark.parametrize(("num_clients", "num_classes"), [(3, 4), (24, 24), (30, 200)])
def test_a_partition_has_names_where_they_fit_and_numbers_where_not(num_clients: int, num_classes: int) -> None:
    names = Names(named(num_clients), named(num_classes))
    counts = np.ones((num_clients, num_classes), dtype=np.int64)
    targets, owners = np.arange(60, dtype=np.float32), np.arange(60) % num_clients
    ids = np.arange(num_clients)
    for figure in (
        partition_picture(counts, None, names),
        target_picture(targets, owners, num_clients, ids, names),
        sizes_picture(counts.sum(1), ids, names),
    ):
        axes = figure.axes[0]
        FigureCanvasAgg(figure).draw()
        none_collide(figure, axes.get_xticklabels())
        shown = [text.get_text() for text in axes.get_xticklabels()]
        assert (shown[1] == "wwwwwwwwwwwwwww…") == (num_clients <= 24)
    classes = partition_picture(counts, None, names).axes[0].get_yticklabels()
    assert (classes[0].get_text() == "0 aquarium fish") == (num_classes <= 24)
