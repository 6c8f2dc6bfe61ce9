"""What nodes have signed, in a record and in a site's receipts: every fault in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cryptography.x509 import Certificate

from lit_fed.engine.storage.chain import ChainReading
from lit_fed.errors import CheckpointError
from lit_fed.federation.keys.statements import Certificates, End
from lit_fed.record.check import Check
from lit_fed.record.lines import NAME, differences

Authorities = Sequence[Certificate] | None
"""The authorities of certificates; None believes the certificates that are there."""
_ODD = (AttributeError, IndexError, KeyError, TypeError, ValueError)  # of fields of another type than a run's


class Signatures:
    """The statements in a record.

    Args:
        check: The record.
        authorities: See `Authorities`.

    Attributes:
        run: The id of the run that nodes name when they sign; empty if they do not.
        count: The number of statements.
    """

    def __init__(self, check: Check, authorities: Authorities) -> None:
        self.check, self.authorities, self.certificates = check, authorities, Certificates()
        self.run, self.count, self._packed = "", 0, list[str]()

    def faults(self) -> Iterator[str]:
        """Everything that is wrong with them."""
        before: Mapping[str, Any] = {}
        for round_idx, line in sorted(self.check.rounds.items()):
            try:
                yield from (f"round {round_idx}: {fault}" for fault in self._line(line, before))
            except _ODD as error:
                yield f"round {round_idx}: {NAME} has signatures that no run writes: {error}"
            before = line

    def _line(self, line: Mapping[str, Any], before: Mapping[str, Any]) -> Iterator[str]:
        signed, updates, cohort = (line.get(key, {}) for key in ("signed", "updates", "cohort"))
        if "signing" in line:
            self.run, self._packed = line["signing"]["run"], line["signing"]["packed"]
        for name, texts in line.get("certificates", {}).items():
            yield from trusted(self.certificates, texts, name, "node", self.authorities)
        for name, one in signed.items():
            self.count += 1
            if why := self.certificates.objection("update", one):
                yield f"signed.{name} {why}"
            due = self._due(name, one, line)
            yield from differences({"signed": {name: due}}, {"signed": {name: {key: one[key] for key in due}}})
            if cohort.get(name, [""])[0] == "on_time" and name not in updates and not self._packed:
                yield f"the update of client {name} was signed, and is left out"
        if "sum" in line and len(signed) != (nodes := line["metrics"]["secure_sum/nodes"]):
            yield f"the sum is of {nodes:.0f} nodes, and {len(signed)} have signed"
        both = [*before.get("signed", {}).items(), *signed.items()]
        stated = [(name, one["sent"], one["weight"]) for name, one in both]
        for name, told in updates.items() if self.run else ():
            client, *content = name.removesuffix(" again"), told.get("sha256"), told.get("weight")
            known = [one for one in stated if one[0] == client and (self._packed or list(one[1:]) == content)]
            if "summed" not in told and not known:
                yield f"the update of client {name} is not one that its node signed"

    def _due(self, name: str, one: Mapping[str, Any], line: Mapping[str, Any]) -> dict[str, Any]:
        """What a statement says at its place in the record."""
        _, version = line["cohort"].get(name, ("", None))
        due = {"run": self.run, "round": line["round"] if version is None else version}
        due |= {"key": name} if one["weight"] is None else {"clients": [int(name)]}
        sent = list(self.check.rounds.get(one["round"], {}).get("broadcast", {}).values())
        if sent and one["clients"] and "broadcast" not in self._packed:
            due["received"] = one["received"] if one["received"] in sent else sent[0]
        return due


class SiteReceipts:
    """A site's receipts.

    Args:
        path: The file.
        authorities: See `Authorities`.
    """

    def __init__(self, path: Path, authorities: Authorities) -> None:
        if not path.is_file():
            raise CheckpointError(f"--receipts {path} is not a file; give a node's receipts.jsonl")
        self.path, self.authorities = path, authorities
        self.receipts = list[dict[str, Any]]()
        self._keys = set[str]()  # the node's

    def faults(self, record: Signatures | None) -> Iterator[str]:
        """Everything that is wrong with them, by themselves and, where it is there, by the record."""
        reading = ChainReading(self.path)
        for _, line in reading:
            try:
                yield from self._line(line)
            except _ODD as error:
                yield f"{self.path} has a line that no node writes: {error}"
        yield from (f"{fault}: one of the two was edited, or a line between them removed" for fault in reading.faults)
        if record is not None:
            yield from self._against(record)

    def _line(self, line: Mapping[str, Any]) -> Iterator[str]:
        certificates = Certificates()
        yield from trusted(certificates, line["server"], None, "server", self.authorities)
        yield from trusted(certificates, line["node"], None, "node", self.authorities)
        server, own = certificates
        self._keys.add(own)
        for receipt in line["receipts"]:
            if odd := certificates.receipt_objection(receipt, server, own):
                yield f"{called(receipt)} {odd}"
            self.receipts.append(receipt)

    def _against(self, record: Signatures) -> Iterator[str]:
        """By the newest receipt of each statement, as a resume from an earlier round gives another one."""
        newest = {_place(one["statement"]): one for one in self.receipts if one["statement"]["run"] == record.run}
        if not newest:
            yield f"{self.path} has no receipt of the run of {NAME}"
        for round_idx, line in record.check.rounds.items() if newest else ():
            for name, one in line.get("signed", {}).items():
                fate = line["cohort"].get(name, ["on_time"])[0]
                due = {"statement": one, "round": round_idx, "line": record.check.heads[round_idx]}
                if one["key"] not in self._keys:
                    continue
                if (receipt := newest.pop(_place(one), None)) is None:
                    yield f"{self.path} lacks the receipt of round {round_idx} for clients {one['clients']}"
                    continue
                due["fate"] = receipt["fate"] if receipt["fate"] == "dropped" else fate
                yield from (f"{called(receipt)}: {odd}" for odd in differences(due, {key: receipt[key] for key in due}))
        yield from (f"{called(one)} is of a statement that {NAME} does not have" for one in newest.values())


def trusted(
    certificates: Certificates, texts: Sequence[str], name: str | None, end: End, authorities: Authorities
) -> Iterator[str]:
    """Add a certificate; say why it is not what it should be."""
    found = certificates.add(texts)
    if name not in (None, found):
        yield f"the certificate of key {name} has another key"
    if authorities is not None and (why := certificates.distrust(found, end, authorities)):
        yield f"the certificate {certificates[found][0].subject.rfc4514_string()} {why}"


def called(receipt: Mapping[str, Any]) -> str:
    """A receipt in words."""
    return f"the receipt of round {receipt['round']} for clients {receipt['statement']['clients']}"


def _place(statement: Mapping[str, Any]) -> tuple[Any, ...]:
    return statement["round"], *statement["clients"]
