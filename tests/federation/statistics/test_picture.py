"""The picture of statistics tells the clients apart."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.colors import to_hex

from lit_fed.data import Diabetes, Digits
from lit_fed.federation.statistics.picture import draw
from tests.federation.statistics.test_federation import taken


def test_each_client_has_a_line_of_its_own_colour_which_is_that_of_its_name() -> None:
    figure = draw(taken(Digits(num_clients=6, max_train_samples=120)))
    histogram, clients = figure.axes[0], figure.axes[-1]
    lines = [to_hex(one.get_edgecolor()) for one in histogram.patches[1:]]  # the first is the bar of all clients
    names = [to_hex(label.get_color()) for label in clients.get_xticklabels()]
    assert len(set(lines)) == 6
    assert lines == names


def test_bars_of_few_clients_have_their_colours_and_counts_whole_ticks() -> None:
    clients: Any = draw(taken(Diabetes(num_clients=10, max_train_samples=20))).axes[-1]
    assert [to_hex(bar.get_facecolor()) for bar in clients.patches] == [
        to_hex(label.get_color()) for label in clients.get_xticklabels()
    ]
    assert len({to_hex(bar.get_facecolor()) for bar in clients.patches}) == 10
    assert [tick % 1 for tick in clients.get_yticks()] == [0] * len(clients.get_yticks())  # up to 2 samples


def test_more_clients_than_colours_have_a_row_each() -> None:
    statistics = taken(Diabetes(num_clients=12, max_train_samples=120))
    figure: Any = draw(statistics)
    axis = figure.axes[0]
    steps = [patch.get_data() for patch in axis.patches]
    bars, lines = steps[:12], steps[12:]
    assert [int(one.baseline) for one in sorted(bars, key=lambda one: -one.baseline)] == list(range(11, -1, -1))
    largest = max(max(site.cells[0][1:-1] / site.count[0]) for site in statistics.sites.values())
    for row, one, site in zip(range(11, -1, -1), lines, statistics.sites.values(), strict=True):
        np.testing.assert_allclose(one.values - row, 0.9 / largest * site.cells[0][1:-1] / site.count[0])
    assert [label.get_text() for label in axis.get_yticklabels()] == list(statistics.sites)
    assert "each client (a row)" in figure.get_suptitle()
