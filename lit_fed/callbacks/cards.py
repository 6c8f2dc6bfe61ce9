"""Cards and pictures of the wrappers around a run's method: its privacy, its attack and rule."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lit_fed.callbacks.boards import boards, show_picture
from lit_fed.callbacks.pictures import left_out_map
from lit_fed.callbacks.recorder import RoundTable
from lit_fed.data.population.pictures import render
from lit_fed.engine.loop.run import Callback, RoundRecord
from lit_fed.engine.method.wrapper import Aggregation, Attack
from lit_fed.engine.storage.files import in_place_of, write_text

if TYPE_CHECKING:
    from lit_fed.engine.loop.run import Run


_FILE = "left_out.png"
_CELLS = 10**7  # of a map in memory


class LeftOut(Callback):
    """Draws clients and rounds by how much an update counted, as ``left_out.png`` in the run's folder and for loggers.

    Draws when the run ends, from ``clients.csv``, if `trainer.aggregation` or `trainer.attack` is set.
    """

    def on_fit_end(self, run: Run) -> None:
        """Draw the map, before `Dashboard` closes the loggers.

        Raises:
            CheckpointError: If ``clients.csv`` cannot be read, or the picture not written.
        """
        around = any(isinstance(wrapper, Aggregation | Attack) for wrapper in run.federation.wrappers.stack)
        around = around and run.settings.enable_pictures
        num_clients, num_rounds = run.federation.data.num_clients, run.next_round
        if not around or run.withholds or not run.fabric.is_global_zero or not 0 < num_clients * num_rounds <= _CELLS:
            return
        shares, attackers, weighted = _read(run.log_dir / "clients.csv", num_rounds, num_clients)
        if not weighted and not attackers.any():
            return
        figure = left_out_map(shares, attackers, weighted, run.federation.data.client_names)
        path = run.log_dir / _FILE
        with in_place_of(path) as temporary:
            figure.savefig(temporary, format="png", metadata={"Software": None})
        show_picture(run, "pictures/left_out", render(figure), num_rounds - 1)


def _read(path: Path, num_rounds: int, num_clients: int) -> tuple[NDArray[np.float64], NDArray[np.bool_], bool]:
    """The arguments of `left_out_map`, from the file of a run."""
    weights, sent = np.full((num_rounds, num_clients), np.nan), np.zeros((num_rounds, num_clients), bool)
    attackers = np.zeros(num_clients, bool)
    for row in RoundTable(path).rows():
        if row["stage"] != "train":
            continue
        round_idx, client_id = int(row["round"]), int(row["client_id"])
        sent[round_idx, client_id] = True
        if row["metric"] == "aggregation/weight":
            weights[round_idx, client_id] = float(row["value"])
        elif row["metric"] == "attack/attacker":
            attackers[client_id] = True
    counts = (~np.isnan(weights)).sum(1, keepdims=True)
    if not counts.any():
        return np.where(sent, 1.0, np.nan), attackers, False
    weights[sent & (counts == 0)] = 0  # a skipped round
    return np.clip(weights * counts, 0, 1), attackers, True


class Cards(Callback):
    """Writes ``<name>.md`` after every round, and shows it to loggers that take texts when the run ends."""

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """Write the cards, before the round's checkpoint.

        Raises:
            CheckpointError: If they cannot be written.
        """
        if run.fabric.is_global_zero:
            for name, card in run.federation.wrappers.cards(run.federation.server).items():
                write_text([card], run.log_dir / f"{name}.md")

    def on_fit_end(self, run: Run) -> None:
        """Show the cards, before `Dashboard` closes the loggers."""
        for name, card in run.federation.wrappers.cards(run.federation.server).items() if run.next_round else ():
            for board in boards(run):
                board.text(name, card, run.next_round - 1)
