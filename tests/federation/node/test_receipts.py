"""A node keeps receipts that are the server's and of its own statements, each once; whatever else comes is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from lit_fed.engine.storage.chain import ChainReading
from lit_fed.errors import WireError
from lit_fed.federation.keys.authority import certify, new_key
from lit_fed.federation.keys.statements import SigningKey
from lit_fed.federation.messages import schema
from lit_fed.federation.messages.wire import Message, decode, encode
from lit_fed.federation.node.receipts import NAME, ReceiptBook
from tests.federation.signing_support import Keys, made_keys, nodes_with
from tests.federation.support import small
from tests.support import Points

RUN = "ab" * 8
DUE = {"run": RUN, "round": 2, "clients": [0], "received": "c" * 64, "weight": 3}
PAYLOAD = {"w": torch.tensor([1.0, 2.0])}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return made_keys(tmp_path_factory.mktemp("federation"))


def receipt(keys: Keys, by: SigningKey | None = None, of: SigningKey | None = None, **changes: Any) -> dict[str, Any]:
    """A receipt of a statement, by the server if nobody else signs it."""
    statement = (of or keys.sites[0]).signed("update", {**DUE, "sent": "d" * 64} | changes.pop("statement", {}))
    content = {"statement": statement, "fate": "on_time", "round": 2, "line": "e" * 64}
    return (by or keys.server).signed("receipt", content | changes)


def message(keys: Keys, *receipts: dict[str, Any], run: str = RUN, certificates: Any = None) -> schema.Receipts:
    return schema.Receipts(run, certificates or keys.server.certificates, list(receipts))


def book(keys: Keys, folder: Path) -> ReceiptBook:
    return ReceiptBook(keys.sites[0], folder, print)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [line for _, line in ChainReading(folder / NAME)]


def test_a_receipt_is_kept_once_also_after_a_restart_and_with_another_signature(keys: Keys, tmp_path: Path) -> None:
    one = receipt(keys)
    mine = book(keys, tmp_path)
    mine.take(message(keys, one))
    mine.take(message(keys, one))
    again = {name: entry for name, entry in one.items() if name not in ("key", "signature")}
    other = keys.server.signed("receipt", again)
    assert other["signature"] != one["signature"]
    book(keys, tmp_path).take(message(keys, other))
    (line,) = lines(tmp_path)
    assert line["receipts"] == [one]
    assert line["server"] == keys.server.certificates
    assert line["node"] == keys.sites[0].certificates


def changed(*place: Any, value: Any) -> Callable[[dict[str, Any]], Any]:
    def change(one: dict[str, Any]) -> None:
        inside = one
        for key in place[:-1]:
            inside = inside[key]
        inside[place[-1]] = value

    return change


NOT_SIGNED = "the receipt of round 2 is not signed by the server"
CHANGES: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
    (changed("signature", value="00" * 60), NOT_SIGNED),
    (changed("signature", value="odd"), NOT_SIGNED),
    (changed("line", value="f" * 64), NOT_SIGNED),
    (changed("fate", value="late"), NOT_SIGNED),
    (changed("round", value=5), "the receipt of round 5 is not signed by the server"),
    (changed("more", value=1), NOT_SIGNED),
    (changed("key", value="0" * 64), NOT_SIGNED),
    *[(changed("statement", name, value=value), NOT_SIGNED) for name, value in
      [("weight", 4), ("sent", "0" * 64), ("received", None), ("clients", [1]), ("round", 1), ("run", "0" * 16)]],
    (changed("round", value="x"), "malformed"),
    (changed("statement", value=None), NOT_SIGNED),
    (lambda one: one.pop("key"), "malformed"),
    (lambda one: one.pop("statement"), "malformed"),
    (lambda one: one["statement"].pop("signature"), "not signed by the server"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "named"), CHANGES)
def test_a_changed_receipt_is_refused_and_none_of_its_message_is_kept(
    change: Callable[[dict[str, Any]], Any], named: str, keys: Keys, tmp_path: Path
) -> None:
    one, mine = receipt(keys), book(keys, tmp_path)
    odd = deepcopy(one)
    change(odd)
    with pytest.raises(WireError, match=named):
        mine.take(message(keys, one, odd))
    assert not (tmp_path / NAME).exists()
    mine.take(message(keys, one))
    assert len(lines(tmp_path)) == 1


def test_what_a_server_or_another_site_makes_up_is_refused(keys: Keys, tmp_path: Path) -> None:
    mine = book(keys, tmp_path)

    def why(*receipts: dict[str, Any], **more: Any) -> str:
        with pytest.raises(WireError) as error:
            mine.take(message(keys, *receipts, **more))
        return str(error.value)

    mine_not = "the receipt of round 2 is of a statement that the node has not signed"
    assert why(receipt(keys, of=keys.sites[1])) == mine_not
    assert why(receipt(keys, of=keys.server)) == mine_not
    elsewhere = "the receipt of round 2 is of a statement from another run, or from a later round"
    assert why(receipt(keys), run="cd" * 8) == elsewhere
    assert why(receipt(keys, statement={"round": 3})) == elsewhere
    assert why(receipt(keys, by=keys.sites[0])) == NOT_SIGNED
    by_site = {"certificates": keys.sites[1].certificates}
    assert (
        why(receipt(keys, by=keys.sites[1]), **by_site) == "the certificate of the server's receipts is not a server's"
    )
    assert "malformed" in why(receipt(keys), certificates=["no certificate"])
    stranger = new_key()
    own = keys.sites[0].authorities[0]
    from datetime import UTC, datetime

    from cryptography.hazmat.primitives.serialization import Encoding

    made = certify(stranger, own, stranger.public_key(), "server", ("127.0.0.1",), datetime.now(UTC))
    forged = SigningKey(stranger, [made.public_bytes(Encoding.PEM).decode()], [])
    assert "is not issued by the authority" in why(receipt(keys, by=forged), certificates=forged.certificates)
    assert not (tmp_path / NAME).exists()


def test_a_server_cannot_fill_the_disk_with_receipts_of_one_statement(keys: Keys, tmp_path: Path) -> None:
    mine, first = book(keys, tmp_path), receipt(keys)
    content = {name: entry for name, entry in first.items() if name not in ("key", "signature")}
    several = [keys.server.signed("receipt", content | {"line": f"{place:064x}"}) for place in range(17)]
    for one in several[:16]:
        mine.take(message(keys, one))
    with pytest.raises(WireError, match="is one of more than 16 of the same statement"):
        mine.take(message(keys, several[16]))
    with pytest.raises(WireError, match="is one of more than 16 of the same statement"):
        book(keys, tmp_path).take(message(keys, several[16]))
    assert len(lines(tmp_path)) == 16


def test_a_node_answers_a_refusal_and_goes_on(keys: Keys, tmp_path: Path) -> None:
    said = list[str]()
    node = nodes_with(small(data=lambda: Points(4), record=True), keys, tmp_path, said.append)[0]
    with node.at_work():
        odd = receipt(keys) | {"fate": "late"}
        answer = decode(node.handle(bytes(encode(Message.pack(message(keys, odd))))))
        assert (answer.word, answer.fields["cause"]) == ("failure", NOT_SIGNED)
        assert decode(node.handle(bytes(encode(Message.pack(message(keys, receipt(keys))))))).word == "answer"
    assert any(NOT_SIGNED in line for line in said)
    plain = nodes_with(small(data=lambda: Points(4)), keys, tmp_path / "plain")[0]
    with plain.at_work():
        answer = decode(plain.handle(bytes(encode(Message.pack(message(keys, receipt(keys)))))))
    assert "a message is 'receipts', and 'train' is due" in answer.fields["cause"]


def test_a_torn_line_stays_and_an_edited_one_is_said(keys: Keys, tmp_path: Path) -> None:
    book(keys, tmp_path).take(message(keys, receipt(keys)))
    path = tmp_path / NAME
    path.write_bytes(path.read_bytes() + b'{"receipts":[')
    book(keys, tmp_path).take(message(keys, receipt(keys, line="f" * 64)))
    assert len(lines(tmp_path)) == 2
    texts = path.read_text().splitlines(keepends=True)
    texts[0] = json.dumps(json.loads(texts[0]) | {"node": []}) + "\n"
    path.write_text("".join(texts))
    said = list[str]()
    ReceiptBook(keys.sites[0], tmp_path, said.append)
    assert "receipts.jsonl, line 3 does not follow receipts.jsonl, line 2" in said[0]
