"""Tolerated failures of clients: report and count them, and end the run where every client fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from lit_fed.errors import ClientFailure, NobodyLeft

_IN_A_ROW = 10  # this many failures in a row, or every client's, have a common cause
_SHOWN = 5


class Failures:
    """Failures that ``on_client_failure: skip`` tolerated, in this process's rounds."""

    def __init__(self) -> None:
        self.causes: Counter[str] = Counter()
        self.clients: set[int] = set()
        self._in_a_row: set[int] = set()

    @property
    def count(self) -> int:
        """Number of lost updates."""
        return self.causes.total()

    def take(
        self,
        failures: Sequence[ClientFailure],
        working: Sequence[int],
        population: int,
        say: Callable[[str], object],
    ) -> None:
        """Add a round's failures, and report new causes.

        Args:
            failures: Ascending by client.
            working: All clients that worked in the round.
            population: Number of clients that may work.
            say: Prints a line.

        Raises:
            NobodyLeft: If the last ten clients, or all, failed without a success in between.
        """
        failed = {failure.client_id for failure in failures}
        for failure in failures:
            if failure.cause not in self.causes:
                say(f"{failure}; the run continues without it; further failures of this cause are not printed")
            self.causes[failure.cause] += 1
        self.clients |= failed
        self._in_a_row = self._in_a_row | failed if failed.issuperset(working) else set()
        if len(self._in_a_row) >= min(population, _IN_A_ROW):
            last = failures[-1]
            raise NobodyLeft(
                f"no client is left: {len(self._in_a_row)} clients failed in a row, the last one client "
                f"{last.client_id} in round {last.round_idx}: {last.cause}"
            )

    def summary(self) -> str:
        """All failures in one line."""
        clients = f"{len(self.clients)} client{'' if len(self.clients) == 1 else 's'}"
        causes = [f"{count} × {cause}" for cause, count in self.causes.most_common(_SHOWN)]
        more = ["…"] if len(self.causes) > _SHOWN else []
        return f"continued without {self.count} updates of {clients}: {'; '.join([*causes, *more])}"
