"""The picture of statistics tells the clients apart."""

from __future__ import annotations

from matplotlib.colors import to_hex

from lit_fed.data import Digits
from lit_fed.federation.statistics.picture import draw
from tests.federation.statistics.test_federation import taken


def test_each_client_has_a_line_of_its_own_colour_which_is_that_of_its_name() -> None:
    figure = draw(taken(Digits(num_clients=6, max_train_samples=120)))
    histogram, clients = figure.axes[0], figure.axes[-1]
    lines = [to_hex(one.get_edgecolor()) for one in histogram.patches[1:]]  # the first is the bar of all clients
    names = [to_hex(label.get_color()) for label in clients.get_xticklabels()]
    assert len(set(lines)) == 6
    assert lines == names
