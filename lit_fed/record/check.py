"""A run's files against its record, without data: every difference in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lit_fed.callbacks.recorder import RoundTable
from lit_fed.engine.loop.checkpoint import read_checkpoint
from lit_fed.engine.storage.chain import BEGIN, ChainReading
from lit_fed.errors import CheckpointError
from lit_fed.record.lines import NAME, Hashes, differences, hash_of_file, hash_of_rows, plain

_EDITED = "one of the two was edited, or a line between them removed or moved"


class Check:
    """A run's record as it is read, and its files.

    Args:
        folder: The run's folder, or its record alone.

    Attributes:
        heads: Hashes of the lines of rounds.
        starts: Lines on what the rounds after them depend on.
        rounds: Lines of rounds, by round.
        ended: Whether the run came to its end.
        last: Hash of the last line.
        found: What is wrong with the lines themselves.

    Raises:
        CheckpointError: If there is no record.
    """

    def __init__(self, folder: Path) -> None:
        self.is_alone = folder.is_file()
        path = folder if self.is_alone else folder / NAME
        if not path.is_file():
            raise CheckpointError(f"{folder} has no {NAME}, which a run writes with trainer.record: true")
        self.folder, self.ended, self.found = folder, False, list[str]()
        self.starts, self.rounds = list[dict[str, Any]](), dict[int, dict[str, Any]]()
        self.heads, self._files, self._known = {-1: BEGIN}, dict[str, str](), set[str]()
        reading = ChainReading(path)
        for digest, line in reading:
            try:
                self._take(digest, line)
            except (AttributeError, KeyError, TypeError, ValueError):
                self.found.append(f"{NAME} has a line that no run writes: {str(line)[:80]}")
        self.last = reading.last
        self.found += [f"{fault}: {_EDITED}" for fault in reading.faults]
        self.found += [f"{torn} is torn, and a resume completes it" for torn in reading.torn]

    def _take(self, digest: str, line: dict[str, Any]) -> None:
        due, is_round = max(self.rounds, default=-1) + 1, "server" in line
        if self.ended or (line.get("round") != due and (self.rounds or self.starts)):
            self.found.append(f"{NAME} has round {line.get('round')} where {'its end' if self.ended else due} is due")
            return
        self.ended = not is_round and "facts" not in line
        if is_round:
            self.rounds[line["round"]], self.heads[line["round"]] = line, digest
        elif not self.ended:
            self.starts.append(line)
        elif line.keys() != {"round", "files", "previous"}:
            self.found.append(f"{NAME} ends with {', '.join(line)}")
        self._files |= line["files"]
        self._known |= set(line["files"].values())

    def run(self) -> Iterator[str]:
        """Everything that differs."""
        yield from self.found
        for part in () if self.is_alone else (self._configurations, self._tables, self._whole_files, self._checkpoints):
            try:
                yield from part()
            except (CheckpointError, ValueError) as error:
                yield str(error)
            except (AttributeError, KeyError, TypeError) as error:
                yield f"{NAME} has fields that no run writes: {error}"

    def _configurations(self) -> Iterator[str]:
        following = [*self.starts[1:], None]
        for start, after in zip(self.starts, following, strict=True):
            name = "config.yaml" if after is None else f"config.until_round_{after['round'] - 1}.yaml"
            text = start["facts"]["config"]
            if text and (after is None or text != after["facts"]["config"]):
                path = self.folder / name
                if not path.is_file() or path.read_text(encoding="utf-8") != text:
                    yield f"{name} is not the configuration of {NAME}"

    def _tables(self) -> Iterator[str]:
        rows = defaultdict[int, list[tuple[str, ...]]](list)
        for row in RoundTable(self.folder / "clients.csv").rows():
            rows[int(row["round"])].append(tuple(row[key] for key in ("client_id", "stage", "metric", "value")))
        metrics = {int(row.pop("round")): row for row in RoundTable(self.folder / "metrics.csv").rows()}
        for round_idx in sorted(self.rounds.keys() | rows.keys() | metrics.keys()):
            line, mine = self.rounds.get(round_idx, {}), rows.get(round_idx, [])
            cells = {name: float(value) for name, value in metrics.get(round_idx, {}).items() if value}
            told = {"metrics": line.get("metrics", {}), "rows of clients.csv": line.get("rows")}
            there = {"metrics": plain(cells), "rows of clients.csv": hash_of_rows(mine)}
            if mine:  # values of single clients may be withheld
                got = {client_id for client_id, _, metric, _ in mine if metric == "downlink_bytes"}
                sent = dict[str, float]()
                for client_id, _, metric, value in mine:
                    if metric == "uplink_bytes":
                        sent[f"{client_id}{' again' * (client_id in sent)}"] = float(value)
                told["cohort"], there["cohort"] = dict.fromkeys(line.get("cohort", {}), ""), dict.fromkeys(got, "")
                told["bytes of client"] = {one: of["bytes"] for one, of in line.get("updates", {}).items()}
                there["bytes of client"] = sent
            yield from (f"round {round_idx}: {odd}" for odd in differences(told, there))

    def _whole_files(self) -> Iterator[str]:
        for name, known in self._files.items():
            path, may_be_newer = self.folder / name, name.endswith(".ckpt") or not self.ended
            if not path.is_file() or (not may_be_newer and hash_of_file(path) != known):
                yield f"{name} is not the file of {NAME}, or missing"

    def _checkpoints(self) -> Iterator[str]:
        due = {"last": max(self.rounds, default=-1)} if self.ended else {}
        for path in sorted((self.folder / "checkpoints").glob("*.ckpt"), reverse=True):  # last, which knows best, first
            content, number = read_checkpoint(path), path.stem.partition("=")[2]
            done, states = content["round_idx"] - 1, content["callbacks"]
            if path.stem == "last":
                due["best"] = states.get("Checkpoint", {}).get("best_round", done)
            if done != (wanted := int(number) if number else due.get(path.stem, done)):
                yield f"{path.name} is of round {done}, and round {wanted} is due"
            elif odd := next(self.unlike(content), None):
                yield f"{path.name}: after round {done}, {odd}"
            elif states.get("Record", {}).get("head") != self.heads.get(done):
                yield f"{path.name} holds another hash of round {done}'s line: lines were written anew, or this file"
            elif hash_of_file(path) not in self._known and (self.ended or done + 1 in self.rounds):
                yield f"{path.name} is not the file of {NAME}: something beside the server's state was changed"

    def unlike(self, content: dict[str, Any]) -> Iterator[str]:
        """In what a checkpoint's server differs from the record.

        A checkpoint names the frozen parameters of a pretrained file, and does not hold them.
        """
        if not content["round_idx"]:
            return  # before the first line
        told = self.rounds.get(content["round_idx"] - 1, {}).get("server", {})
        here = Hashes().state(content["server"])
        for name in (f".{name}" for names in content.get("base", {}).values() for name in names):
            here |= {key: one for key, one in told.items() if key.endswith(name)}
        yield from differences({"server": told}, {"server": here})
