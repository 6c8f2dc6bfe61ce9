"""Lines about clients without an answer: the first, how many followed, and that a client answers again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from lit_fed.errors import ClientFailure
from lit_fed.federation.ends import Alert


class Absences:
    """Prints once for each cause that a client does not answer a protocol, and when it answers again.

    Args:
        say: Prints a line.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self.say = say
        self._causes: dict[tuple[str, int], Counter[str]] = {}

    def missing(self, protocol: str, failure: ClientFailure) -> None:
        """Count a failed answer; print it if it is the first of its cause since the client's last answer."""
        causes = self._causes.setdefault((protocol, failure.client_id), Counter())
        causes[failure.cause] += 1
        if causes[failure.cause] == 1:
            self.say(Alert(f"{failure}; its {protocol} metrics are missing"))

    def answered(self, protocol: str, client_id: int) -> None:
        """Print that a client answers again, if lines about it were left out."""
        causes = self._causes.pop((protocol, client_id), Counter())
        if (count := causes.total()) > len(causes):
            self.say(f"client {client_id} has {protocol} metrics again, after {count} failures")
