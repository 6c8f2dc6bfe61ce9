"""The callback that writes a run's record."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from typing_extensions import override

from lit_fed.callbacks import Callback, RoundRecord, Run
from lit_fed.engine.storage.chain import BEGIN, Chain, ChainReading
from lit_fed.engine.storage.files import write_text
from lit_fed.engine.wire.payload import Broadcast, ClientUpdate
from lit_fed.engine.wire.workers import on_first_process
from lit_fed.errors import CheckpointError
from lit_fed.participation import Participant
from lit_fed.record.lines import NAME, Hashes, facts_of, hash_of_file, hash_of_rows, plain


class Record(Callback):
    """Writes ``record.jsonl``: a line for each round, with the hash of the line before.

    An update is hashed as the server takes it: after its client's attack and the uplink's codec, before the method and
    a robust rule. Where only sums are seen, a line has the clients in the sum; of a private run, no single client. A
    resume removes lines of rounds that run again, and one that a kill tore. A checkpoint holds the hash of its
    round's line.
    """

    keeps_record = True

    def __init__(self) -> None:
        self.head = BEGIN  # hash of the last round's line
        self._hashes = Hashes()
        self._line: dict[str, Any] = {}  # of the round under way
        self._updates: list[tuple[int, str, dict[str, float]]] = []  # client, hash, and numbers
        self._facts: dict[str, Any] | None = None  # of the newest start
        self._is_first = True  # whether no round of this call of `fit` has begun
        self._files: dict[Path, tuple[int, int]] = {}  # the hashed files, as they were then

    def on_fit_start(self, run: Run) -> None:
        """Cut the record back to the checkpoint.

        Raises:
            CheckpointError: If its lines are not those of the run before, or it cannot be written.
        """
        self._updates, self._files, self._is_first = [], {}, True
        on_first_process(run.fabric, lambda: self._open(run))

    def _open(self, run: Run) -> None:
        before, source = self.head if run.start_round else BEGIN, (run.resumed_from or run.log_dir) / NAME
        reading = ChainReading(source)
        numbered = ((digest, line) for digest, line in reading if isinstance(line.get("round"), int))
        kept = [(digest, line) for digest, line in numbered if line["round"] < run.start_round]
        there = kept[-1][0] if kept else BEGIN
        if reading.faults or there != before:
            raise CheckpointError(
                f"{source} is not the record of the rounds before round {run.start_round}, as lit-fed verify shows; "
                "resume without trainer.record, or from an earlier checkpoint"
            )
        lines = source.read_bytes().splitlines(keepends=True) if kept else []
        write_text((line.decode() for line in lines[: len(kept)]), run.log_dir / NAME)
        self.head, self._chain = there, Chain(run.log_dir / NAME)
        self._facts = next((line["facts"] for _, line in reversed(kept) if "facts" in line), None)

    def on_round_start(self, run: Run, round_idx: int, plan: Sequence[Participant]) -> None:
        """Write what the rounds to come depend on, if it is new, and begin the round's line."""
        if not run.fabric.is_global_zero:
            return
        if self._is_first and self._facts != (facts := facts_of(run)):
            self._write({"round": round_idx, "facts": facts, "files": self._new_files(run)})
        self._is_first, self._line = False, {"round": round_idx, "files": self._new_files(run)}

    def on_broadcast(self, run: Run, broadcast: Broadcast) -> None:
        """Hash what each kind of client receives."""
        if run.fabric.is_global_zero:
            whole = {kind: {**one, **broadcast.frozen.get(kind, {})} for kind, one in broadcast.payloads.items()}
            self._line["broadcast"] = {kind: self._hashes.payload(payload) for kind, payload in whole.items()}

    def on_arrival(self, run: Run, update: ClientUpdate) -> None:
        """Hash an update."""
        if run.withholds:
            return
        if run.federation.wrappers.sees_sums_only:
            self._updates.append((update.client_id, "", {"summed": 1}))
            return
        told = {"bytes": update.uplink_bytes, "weight": update.weight}
        signed = run.statements.get("signed", {}).get(str(update.client_id))
        is_known = signed is not None and run.federation.channel.uplink.codec is None  # by the hash that was verified
        digest = signed["sent"] if is_known else self._hashes.payload(update.payload)
        self._updates.append((update.client_id, digest, told))

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """Write the round's line.

        Raises:
            CheckpointError: If it cannot be written.
        """
        arrived = sorted(one for part in run.workers.gather(self._updates) for one in part)
        self._updates = []
        if not run.fabric.is_global_zero:
            return
        models = run.federation.global_models(record.round_idx)
        line = self._line | {"server": self._hashes.state(run.federation.server)}
        line["global"] = {kind: self._hashes.payload(model) for kind, model in models.items()}
        line |= {"metrics": plain(record.metrics), "rows": hash_of_rows(record.rows)}
        if not run.withholds:
            cohort = {str(one.client_id): (one.fate.value, one.version) for one in record.plan}
            line |= {"cohort": cohort, "updates": {}}
            for client_id, digest, told in arrived:  # twice, where a late update arrives beside a new one
                again = " again" if str(client_id) in line["updates"] else ""
                line["updates"][f"{client_id}{again}"] = told | ({"sha256": digest} if digest else {})
        self._write(line | run.statements)
        run.line = self.head

    def on_fit_end(self, run: Run) -> None:
        """Write the end."""
        if run.fabric.is_global_zero and self.head != BEGIN:
            self._chain.append({"round": run.next_round, "files": self._new_files(run)}, lasting=True)

    def _write(self, line: dict[str, Any]) -> None:
        """Append a line, which survives a loss of power as the round's checkpoint does."""
        self.head = sha256(self._chain.append(line, lasting=True).encode()).hexdigest()

    def _new_files(self, run: Run) -> dict[str, str]:
        """Hashes of files that are whole between rounds, where they are new since the last line."""
        found = {}
        cards = (f"{wrapper.name}.md" for wrapper in run.federation.wrappers.stack)
        for name in ("partition.json", "checkpoints/last.ckpt", *cards):
            path = run.log_dir / name
            now = (path.stat().st_ino, path.stat().st_mtime_ns) if path.is_file() else None
            if now is not None and self._files.get(path) != now:
                self._files[path], found[name] = now, hash_of_file(path)
        return found

    def state_dict(self) -> dict[str, Any]:
        """The hash of the last round's line."""
        return {"head": self.head}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.head = str(state["head"])
