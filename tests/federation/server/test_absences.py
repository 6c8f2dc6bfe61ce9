"""A client that is away for a night leaves three lines."""

from __future__ import annotations

from lit_fed.errors import ClientFailure
from lit_fed.federation.server.absences import Absences


def test_an_absence_is_said_once_a_cause_and_its_end_with_a_count() -> None:
    said: list[str] = []
    absences = Absences(said.append)
    absences.answered("clients", 3)
    for round_idx in range(100):
        absences.missing("clients", ClientFailure(3, round_idx, "its node is not connected; restart it"))
        absences.missing("clients", ClientFailure(4, round_idx, "its node is not connected; restart it"))
    absences.missing("clients", ClientFailure(3, 100, "it did not answer within 60 s"))
    absences.answered("clients", 3)
    absences.answered("clients", 3)
    absences.missing("clients", ClientFailure(3, 102, "it did not answer within 60 s"))
    absences.answered("clients", 3)  # nothing was left out
    assert said == [
        "client 3 failed in round 0: its node is not connected; restart it; its clients metrics are missing",
        "client 4 failed in round 0: its node is not connected; restart it; its clients metrics are missing",
        "client 3 failed in round 100: it did not answer within 60 s; its clients metrics are missing",
        "client 3 has clients metrics again, after 101 failures",
        "client 3 failed in round 102: it did not answer within 60 s; its clients metrics are missing",
    ]
