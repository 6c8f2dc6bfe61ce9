"""A node's half of signatures: it signs what it sends, and keeps the server's receipts."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from lit_fed.engine.storage.chain import Chain, ChainReading
from lit_fed.engine.wire.payload import Payload
from lit_fed.errors import WireError
from lit_fed.federation.ends import Alert
from lit_fed.federation.keys.statements import Certificates, SigningKey
from lit_fed.federation.messages import schema
from lit_fed.tensors import hash_of_named

NAME = "receipts.jsonl"
_OFTEN = 16  # maximum number of receipts of a statement; a server that is resumed from an earlier round gives others


class ReceiptBook:
    """Signs what a node sends, and keeps receipts in ``receipts.jsonl``, a chain of lines, beside the node's states.

    Args:
        key: The node's.
        folder: Of the file.
        say: Prints a line.
    """

    def __init__(self, key: SigningKey, folder: Path, say: Callable[[str], object]) -> None:
        self.key, path = key, folder / NAME
        self._chain = Chain(path)
        for fault in self._chain.faults[:1]:
            say(Alert(f"{path}: {fault}; lit-fed verify --receipts lists what was changed"))
        self._kept = defaultdict[str, set[str]](set)  # by statement, what the server has said of it
        for _, line in ChainReading(path):
            self._new(line.get("receipts", []))

    def signature(self, due: Mapping[str, Any], payload: Payload) -> str:
        """Sign what is about to leave: run, round, clients, what they received, their weight, and a payload."""
        signed: str = self.key.signed("update", {**due, "sent": hash_of_named(payload)})["signature"]
        return signed

    def take(self, message: schema.Receipts) -> None:
        """Keep receipts, each once, in a line with the certificates of both ends.

        Raises:
            WireError: If one is not the server's, or of a statement that this node has not signed; none is kept then.
        """
        certificates, ends = Certificates(), {"server": message.certificates, "node": self.key.certificates}
        try:
            server, own = certificates.add(ends["server"]), certificates.add(ends["node"])
            why = certificates.distrust(server, "server", self.key.authorities)
            for receipt in () if why else message.receipts:
                statement, which = receipt["statement"], f"the receipt of round {int(receipt['round'])}"
                if odd := certificates.receipt_objection(receipt, server, own):
                    raise WireError(f"{which} {odd}")
                if statement["run"] != message.run or statement["round"] > receipt["round"]:
                    raise WireError(f"{which} is of a statement from another run, or from a later round")
                if len(self._kept[_hash(statement)]) >= _OFTEN:
                    raise WireError(f"{which} is one of more than {_OFTEN} of the same statement")
        except (AttributeError, KeyError, TypeError, ValueError):
            why = "or a receipt is malformed"
        if why:
            raise WireError(f"the certificate of the server's receipts {why}")
        if receipts := self._new(message.receipts):
            self._chain.append({"receipts": receipts, **ends}, lasting=True)

    def _new(self, receipts: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Note receipts; return those that are new, whatever their signature."""
        found = []
        for receipt in receipts:
            told = self._kept[_hash(receipt["statement"])]
            content = _hash({name: value for name, value in receipt.items() if name != "signature"})
            if content not in told:
                told.add(content)
                found.append(receipt)
        return found


def _hash(content: Any) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
