"""Cards of the wrappers around a run's method, such as its privacy: in the run's folder and in TensorBoard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lit_fed.callbacks.boards import boards
from lit_fed.engine.loop.run import Callback, RoundRecord
from lit_fed.engine.storage.files import write_text

if TYPE_CHECKING:
    from lit_fed.engine.loop.run import Run


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
