"""The index of clients' states, which are on their nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from typing_extensions import override

from lit_fed.engine.storage.packs import Version, VersionedFiles


class NodeFiles(VersionedFiles):
    """Clients' states, which are on their nodes; only late updates are stored here, in ``directory``.

    Args:
        held: Asks the nodes which versions they hold.
    """

    def __init__(self, directory: Path | None, held: Callable[[], Iterable[tuple[str, int]]]) -> None:
        super().__init__(directory)
        self.held = held
        self.dropped: dict[str, list[int]] = {}
        """By client, the obsolete versions that its node does not know about yet."""

    @override
    def forget(self, gone: Iterable[tuple[str, int]], delete: bool) -> None:
        """Drop versions; a client's node deletes them with the next message to it."""
        here = list[tuple[str, int]]()
        for name, round_idx in gone:
            if name.isdecimal():
                self.dropped.setdefault(name, []).append(round_idx)
            else:
                here.append((name, round_idx))
        super().forget(here, delete)

    @override
    def expect(self, name: str, round_idx: int) -> None:
        if name in self.dropped:
            self.dropped[name] = [at for at in self.dropped[name] if at != round_idx]

    @override
    def copy(self, name: str, version: Version, source: VersionedFiles) -> None:
        if not name.isdecimal():  # nodes keep their clients' states
            super().copy(name, version, source)

    @override
    def rounds(self) -> Iterator[tuple[str, int]]:
        yield from super().rounds()
        yield from self.held()
