"""Who has a key speaks for the node whose key it is, and for no other; what it sends is bounded."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from lit_fed.deployment import fleet, sessions
from tests.deployment.hostile.support import Keyed, connected, many, said_on
from tests.deployment.serving_support import free_address, served

pytest.importorskip("flwr")


def test_a_node_speaks_for_no_other(keys: Path) -> None:
    """Neither answers, asks, nor takes leave for it, nor gets at what is for it."""
    address, pb = free_address(), fleet.proto()
    with served(keys, address) as grid:
        honest, liar = Keyed(keys, address, "node_0"), Keyed(keys, address, "node_1")
        message_id = grid.push(honest.node, b"secret")
        assert list(grid.pull([message_id])) == []
        said, tree = (one[0] for one in (lambda p: (p.messages_list, p.message_object_trees))(honest.pulled()))
        about = said.metadata
        # a message with another's source, and its own answer to another's message
        assert liar.pushed(liar.reply(about, source=honest.node)) == (403, b"the message belongs to another node")
        assert liar.pushed(liar.reply(about)) == (404, b"the answer's message is unknown or expired")
        assert liar.pushed(liar.reply(about, source=honest.node), node=honest.node)[0] == 403
        for name in fleet.names(tree, 20):
            request = pb.PullObjectRequest(node=liar.me(), run_id=about.run_id, object_id=name)
            assert liar.post("pull-object", request) == (404, b"this node has no such object to fetch")
            request.node.node_id = honest.node
            assert liar.post("pull-object", request) == (403, b"the node's id does not belong to this key")
        confirm = pb.ConfirmMessageReceivedRequest(node=liar.me(), message_object_id=about.message_id)
        assert liar.post("confirm-message-received", confirm)[0] == 200  # of none of its own: nothing happens
        others = {
            "pull-messages": pb.PullMessagesRequest(node=liar.me(honest.node)),
            "send-node-heartbeat": pb.SendNodeHeartbeatRequest(node=liar.me(honest.node), heartbeat_interval=10),
            "deactivate-node": pb.DeactivateNodeRequest(node_id=honest.node),
            "activate-node": pb.ActivateNodeRequest(public_key=honest.signer.public, heartbeat_interval=10),
        }
        for word, request in others.items():
            assert liar.post(word, request)[0] == 403, word
        assert set(grid.nodes()) == {honest.node, liar.node}
        # the honest one has lost nothing
        objects = {}
        for name in fleet.names(tree, 20):
            request = pb.PullObjectRequest(node=honest.me(), run_id=about.run_id, object_id=name)
            status, content = honest.post("pull-object", request)
            assert status == 200
            objects[name] = pb.PullObjectResponse.FromString(content).object_content
        assert fleet.unpack(about.message_id, objects, 2**20).endswith(b"secret")
        assert honest.pushed(honest.reply(about))[0] == 200


def test_objects_that_nobody_asked_for_are_refused(keys: Path) -> None:
    address, pb = free_address(), fleet.proto()
    with served(keys, address) as grid:
        honest, liar = Keyed(keys, address, "node_0"), Keyed(keys, address, "node_1")
        list(grid.pull([grid.push(honest.node, b"x"), grid.push(liar.node, b"y")]))
        parcel = honest.reply(honest.pulled().messages_list[0].metadata)
        assert honest.pushed(parcel)[0] == 200
        name, content = next(iter(parcel.objects.items()))
        for session_id, who in ((parcel.message_id, liar), ("", liar), ("", honest), ("x", honest)):
            request = pb.PushObjectRequest(node=who.me(), object_id=name, object_content=content, session_id=session_id)
            assert who.post("push-object", request) == (404, b"the object does not belong to an open upload")
        request = pb.PushObjectRequest(
            node=honest.me(), object_id=name, object_content=content + b"x", session_id=parcel.message_id
        )
        assert honest.post("push-object", request) == (400, b"an object does not match its hash; send it again")


def test_messages_that_make_no_sense_are_refused_and_cost_their_sender(keys: Path) -> None:
    address, pb = free_address(), fleet.proto()
    with served(keys, address) as grid:
        liar = Keyed(keys, address, "node_0")
        message_id = grid.push(liar.node, b"x")
        list(grid.pull([message_id]))
        about = liar.pulled().messages_list[0].metadata
        parcel = liar.reply(about)
        deep = pb.ObjectTree(object_id="0" * 64)
        for _ in range(60):
            deep = pb.ObjectTree(object_id="0" * 64, children=[deep])
        wide = pb.ObjectTree(
            object_id=parcel.message_id, children=[pb.ObjectTree(object_id=f"{n:064x}") for n in range(3000)]
        )
        named = pb.ObjectTree(object_id="../../x")
        for tree in (deep, wide, named):
            assert liar.pushed(fleet.Parcel(parcel.message, tree, {}))[0] == 400
        for request in (
            pb.PushMessagesRequest(node=liar.me()),
            pb.PushMessagesRequest(
                node=liar.me(), messages_list=[parcel.message] * 2, message_object_trees=[parcel.tree] * 2
            ),
        ):
            assert liar.post("push-messages", request)[0] == 400
        for word in fleet.REQUESTS:
            if word != "register-node":
                body = os.urandom(300)
                with connected(keys, address) as line:
                    headers = {"content-length": "300", **liar.signer.headers()}
                    assert said_on(line, f"POST {fleet.PREFIX}{word} HTTP/1.1", headers, body)[0] in (400, 403)
        # an answer whose objects are none: that of this node has failed, in a line
        odd = b"Message  1\0x"
        root = hashlib.sha256(odd).hexdigest()
        parcel.message.metadata.message_id = root
        assert liar.pushed(fleet.Parcel(parcel.message, pb.ObjectTree(object_id=root), {}))[0] == 200
        request = pb.PushObjectRequest(node=liar.me(), object_id=root, object_content=odd, session_id=root)
        assert liar.post("push-object", request)[0] == 200
        (reply,) = grid.pull([message_id])
        assert reply.error == "the objects of a message are malformed; run the same lit_fed on both ends"


def test_what_a_node_has_at_the_server_is_bounded(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two unfinished answers of 3 MiB of which the second is over 5 MiB together; nothing of them stays."""
    monkeypatch.setattr(sessions, "LEAST_HELD_BYTES", 5 * 2**20)
    address, pb = free_address(), fleet.proto()
    with served(keys, address, limit=1) as grid:
        liar = Keyed(keys, address, "node_0")
        ids = [grid.push(liar.node, bytes(2**26)) for _ in range(2)]
        list(grid.pull(ids))
        statuses = []
        for about in [out.parcel.message.metadata for out in grid.sessions.by_node[liar.node].out.values()]:
            parcel = liar.reply(about, os.urandom(3 * 2**20))
            assert liar.pushed(parcel)[0] == 200
            name, content = next(iter(parcel.objects.items()))
            request = pb.PushObjectRequest(
                node=liar.me(), object_id=name, object_content=content, session_id=parcel.message_id
            )
            statuses.append(liar.post("push-object", request)[0])
        assert statuses == [200, 413]
        assert grid.sessions.by_node[liar.node].held < 4 * 2**20


def test_a_node_has_few_connections(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_fed.deployment.gate.MOST_LINES", 3)
    address, pb = free_address(), fleet.proto()
    with served(keys, address), many(5) as lines:
        node = Keyed(keys, address, "node_0")
        body = pb.SendNodeHeartbeatRequest(node=node.me(), heartbeat_interval=10).SerializeToString()
        found = []
        for _ in range(5):
            lines.append(connected(keys, address))
            headers = {"content-length": str(len(body)), **node.signer.headers()}
            found.append(said_on(lines[-1], f"POST {fleet.PREFIX}send-node-heartbeat HTTP/1.1", headers, body)[0])
        assert found == [200, 200, 200, 429, 429]


def test_a_connection_is_one_nodes(keys: Path) -> None:
    address, pb = free_address(), fleet.proto()
    with served(keys, address):
        one, other = Keyed(keys, address, "node_0"), Keyed(keys, address, "node_1")
        with connected(keys, address) as line:
            found = []
            for node in (one, one, other):
                body = pb.SendNodeHeartbeatRequest(node=node.me(), heartbeat_interval=10).SerializeToString()
                headers = {"content-length": str(len(body)), **node.signer.headers()}
                found.append(said_on(line, f"POST {fleet.PREFIX}send-node-heartbeat HTTP/1.1", headers, body)[0])
            assert found == [200, 200, 429]
