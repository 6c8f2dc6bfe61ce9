"""Docstrings keep the facts that they state: equations, citations, notes."""

from __future__ import annotations

from collections import Counter

from tests.plain_english import marks

FLOORS = {
    "data/formats": {"note": 1},
    "data/partitions": {"citation": 16, "note": 3},
    "data/population": {"math": 2, "citation": 10, "note": 2},
    "data/pose": {"citation": 3, "note": 1},
    "data/sets": {"citation": 12, "note": 2},
    "engine/lightning": {"note": 3},
    "engine/loop": {"math": 3, "note": 1},
    "engine/method": {"math": 3, "citation": 1, "note": 1},
    "engine/storage": {"note": 1},
    "engine/wire": {"note": 2},
    "losses": {"math": 17, "citation": 22, "note": 4},
    "methods": {"math": 157, "citation": 46, "note": 33},
    "networks": {"math": 10, "citation": 28, "note": 7},
    "papers": {"math": 41, "citation": 22, "note": 4},
    "participation": {"note": 2},
    "studies": {"citation": 2},
    "tasks": {"math": 5, "citation": 2, "note": 2},
}
"""The equations, citations and notes before issue 46; lower one only with the code that it was about."""


def test_no_equation_citation_or_note_is_lost() -> None:
    counted = marks()
    lost = {
        f"{room}: {name}": (counted.get(room, Counter())[name], least)
        for room, floors in FLOORS.items()
        for name, least in floors.items()
        if counted.get(room, Counter())[name] < least
    }
    assert lost == {}
