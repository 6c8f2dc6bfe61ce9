"""The node's side of the connection: it polls a server for work over Flower's Fleet API. A node opens no port.

The server is `lit_fed.deployment.serving` or a Flower SuperLink. A lost connection delays a request and loses nothing:
the node retries every request until the server answers or no longer knows the node.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

from lit_fed.deployment import fleet
from lit_fed.deployment.ends import ending_by_signal, split_address
from lit_fed.deployment.keys import Signer
from lit_fed.deployment.node import Node
from lit_fed.deployment.security import Security
from lit_fed.deployment.sessions import LEAST_HELD_BYTES
from lit_fed.deployment.wire import join, split
from lit_fed.errors import ConfigError, WireError

if TYPE_CHECKING:
    import httpx

_MOST_IN_PARCEL = 2**16
_BEAT_S = 4.0  # interval of heartbeats
_BEAT_SAID_S = 10.0  # heartbeat interval that Flower is told, its minimum
_AGAIN_S = (0.1, 5.0)  # shortest and longest pause before a retry
_POLL_S = (0.05, 2.0)  # shortest and longest pause between polls, for a server without long polling
_BLIP_S = 3.0  # outage that is not reported
_SAY_S = 60.0  # interval of messages during an outage
_LET_IN_S = 120.0  # time for an operator to register an unknown key
_CLOCKS_APART_S = 30.0  # clock difference that is reported
_TIMES_S = {"connect": 10.0, "read": 60.0, "write": 120.0, "pool": 60.0}


class Unknown(Exception):
    """The server no longer knows this node."""


class Dropped(Exception):
    """The server rejected a message."""


class Line:
    """A node's connection to its server; ``say`` prints a line."""

    def __init__(self, address: str, security: Security, say: Callable[[str], object]) -> None:
        import httpx

        self.address, self.security, self.say = address, security, say
        self.signer = Signer(security.key)
        self.node = 0
        self.connected = self._met = False
        self._lost = _Waiting(address, say)
        # The environment's proxies are for the web; the node connects directly.
        self._http = httpx.Client(
            verify=security.authority() if security.is_on else False,
            base_url=f"{'https' if security.is_on else 'http'}://{address}{fleet.PREFIX}",
            timeout=httpx.Timeout(**_TIMES_S),
            limits=httpx.Limits(max_connections=4, keepalive_expiry=20.0),
            trust_env=False,
        )

    def close(self) -> None:
        """Sign off if the server is reachable, and close the connection."""
        import httpx

        try:
            if self.connected:
                request = fleet.proto().DeactivateNodeRequest(node_id=self.node)
                self._post("deactivate-node", request, httpx.Timeout(2.0))
        except httpx.HTTPError:
            return
        finally:
            self._http.close()

    def connect(self) -> None:
        """Connect, and retry until the server answers; raise `ConfigError` if the server rejects this node."""
        pb, key, begun = fleet.proto(), self.signer.public, None
        while True:
            if self._http.base_url.scheme == "http":
                self._asked("register-node", pb.RegisterNodeFleetRequest(public_key=key))
            request = pb.ActivateNodeRequest(public_key=key, heartbeat_interval=_BEAT_SAID_S)
            response = self._asked("activate-node", request)
            if response.status_code == 200:
                self.node = _read(pb.ActivateNodeResponse, response).node_id
                self.connected = True
                self.say(f"connected to the server at {self.address}; waiting for work")
                return
            begun = begun or time.monotonic()
            why = self._why_refused(response)
            self._lost.note(f"it rejects this node: {why}")
            if time.monotonic() > begun + _LET_IN_S:
                raise ConfigError(f"the server at {self.address} rejects this node: {why}")
            time.sleep(2.0)

    def ask(self, word: str, request: Any, kind: Any) -> Any:
        """Send a request, and retry until the server answers.

        Raises:
            Unknown: If the server no longer knows this node.
            Dropped: If the server rejects the message.
        """
        response = self._asked(word, request)
        if response.status_code == 200:
            return _read(kind, response)
        if response.status_code in (400, 404, 413):
            raise Dropped(response.text[:200])
        raise Unknown

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Send heartbeats in the background."""
        import httpx

        stop, request = threading.Event(), fleet.proto().SendNodeHeartbeatRequest
        node = fleet.proto().Node(node_id=self.node)

        def beat() -> None:
            while not stop.wait(_BEAT_S):
                try:
                    self._post(
                        "send-node-heartbeat", request(node=node, heartbeat_interval=_BEAT_SAID_S), httpx.Timeout(5.0)
                    )
                except (httpx.HTTPError, RuntimeError):  # the next request reports the outage
                    continue

        thread = threading.Thread(target=beat, daemon=True, name="heartbeat")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(6.0)

    # ------------------------------------------------------------------ requests

    def _asked(self, word: str, request: Any) -> httpx.Response:
        """Return the server's response, of any status; retry while the server is unreachable or overloaded."""
        import httpx

        pause = _AGAIN_S[0]
        while True:
            try:
                response = self._post(word, request)
                if response.status_code < 429 or response.status_code in (431, 451):
                    self._met = True
                    self._lost.over()
                    return response
                why = f"it answers {response.status_code} {response.text[:100]}".strip()
            except httpx.TransportError as error:
                why = _reason(error)
                if not self._met:  # it may be the wrong server, for which retrying is futile
                    self.security.greet(self.address)
            self._lost.note(why)
            time.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, _AGAIN_S[1])

    def _post(self, word: str, request: Any, timeout: httpx.Timeout | None = None) -> httpx.Response:
        headers = {"content-type": fleet.MEDIA_TYPE, "accept": fleet.MEDIA_TYPE, **self.signer.headers()}
        more = {} if timeout is None else {"timeout": timeout}
        return self._http.post(word, content=request.SerializeToString(), headers=headers, **more)

    def _why_refused(self, response: httpx.Response) -> str:
        if response.status_code == 409:
            return "another node with the same key is connected; stop it, or give this node another key"
        try:
            apart = time.time() - parsedate_to_datetime(response.headers["date"]).timestamp()
        except (KeyError, ValueError, TypeError):
            apart = 0.0
        if abs(apart) > _CLOCKS_APART_S:
            late = "ahead of" if apart > 0 else "behind"
            return f"its clock is {abs(apart):.0f} s {late} the server's, and at most 60 s are accepted; set the clock"
        if response.status_code == 404:
            return "the program at this address is not a federation server; correct --superlink"
        return (
            "the server does not know its key; send the public key, the file of --key with .pub, to the server's "
            "operator, who enters it in --node_keys"
        )


class _Waiting:
    """Reports that the server is unreachable, and since when."""

    def __init__(self, address: str, say: Callable[[str], object]) -> None:
        self.address, self.say = address, say
        self._contact: datetime | None = None
        self._begun: float | None = None
        self._said = 0.0

    def note(self, why: str) -> None:
        """Note a failed request; print it unless the outage is short or was printed recently."""
        now = time.monotonic()
        if self._begun is None:
            self._begun, self._said = now, 0.0
        if now < self._begun + _BLIP_S or (self._said and now < self._said + _SAY_S):
            return
        if self._contact is None:
            words = f"waiting for the server at {self.address}"
        else:
            words = f"lost the server at {self.address}, last heard of at {self._contact:%H:%M:%S}"
        minutes = f" for {(now - self._begun) / 60:.0f} min" if self._said else ""
        self.say(f"{words}{minutes}: {why}; trying again")
        self._said = now

    def over(self) -> None:
        """Note that the server answered."""
        if self._said and self._contact is not None:
            self.say(f"the server at {self.address} answers again")
        self._contact, self._begun, self._said = datetime.now().astimezone(), None, 0.0


def serve(node: Node, address: str, security: Security) -> None:
    """Run a node until the process is stopped.

    Raises:
        ConfigError: If the server's certificate does not verify, or the server rejects this node.
    """
    security.check(address, ("ca", "key"))
    split_address(address)
    fleet.proto()
    with ExitStack() as stack:
        stack.enter_context(ending_by_signal())
        line = Line(address, security, node.say)
        stack.callback(line.close)
        stack.enter_context(node.at_work())
        security.greet(address)
        attend(node, line)


def attend(node: Node, line: Line) -> None:
    """Do the server's work, and reconnect when the server no longer knows the node."""
    while True:
        line.connect()
        try:
            with line.alive():
                _work(node, line)
        except Unknown:
            line.connected = False


def _work(node: Node, line: Line) -> None:
    """Poll for messages and answer them, as long as the server knows this node."""
    pb, me, pause = fleet.proto(), fleet.proto().Node(node_id=line.node), _POLL_S[0]
    while True:
        asked = time.monotonic()
        found = line.ask("pull-messages", pb.PullMessagesRequest(node=me), pb.PullMessagesResponse)
        if not found.messages_list:
            node.idle()
            if time.monotonic() < asked + 1.0:  # a SuperLink answers at once
                time.sleep(pause)
                pause = min(1.5 * pause, _POLL_S[1])
            continue
        pause = _POLL_S[0]
        said, tree = found.messages_list[0].metadata, found.message_object_trees[0]
        most = max(node.limit, LEAST_HELD_BYTES)
        try:
            blob = _fetch(line, said, tree, most)
        except Dropped:  # the message expired, or the server restarted
            continue
        except WireError as error:
            node.say(str(error))
            answer = fleet.pack_error(str(error), _of_reply(line, said))
        else:
            answer = fleet.pack(_handle_all(node, blob), _of_reply(line, said))
        try:
            _send(line, said, answer)
        except Dropped as error:
            node.say(f"the server rejects this node's answer: {error}")


def _handle_all(node: Node, parcel: bytes) -> bytes:
    try:
        return join([node.handle(blob) for blob in split(parcel, _MOST_IN_PARCEL)])
    except WireError as error:
        node.say(str(error))
        return b""


def _fetch(line: Line, said: Any, tree: Any, most: int) -> bytes:
    """Download a message; raise `WireError` if the message is malformed or too large."""
    pb, me = fleet.proto(), fleet.proto().Node(node_id=line.node)
    objects: dict[str, bytes] = {}
    for name in fleet.names(tree, 8 + 2 * most // fleet.CHUNK_BYTES):
        request = pb.PullObjectRequest(node=me, run_id=said.run_id, object_id=name)
        found = line.ask("pull-object", request, pb.PullObjectResponse)
        while found.object_found and not found.object_available:  # a SuperLink may still be receiving it
            time.sleep(_POLL_S[0])
            found = line.ask("pull-object", request, pb.PullObjectResponse)
        objects[name] = found.object_content
        fleet.check_object(name, objects[name])
        if sum(map(len, objects.values())) > most + fleet.MOST_ABOUT_BYTES:
            raise WireError(f"a message is over the limit of {most:,} bytes; raise --most_bytes on both ends")
    blob = fleet.unpack(tree.object_id, objects, most)
    confirm = pb.ConfirmMessageReceivedRequest(node=me, run_id=said.run_id, message_object_id=tree.object_id)
    line.ask("confirm-message-received", confirm, pb.ConfirmMessageReceivedResponse)
    return blob


def _of_reply(line: Line, said: Any) -> Any:
    """Return Flower's metadata for the answer to a message."""
    left = max(said.created_at + said.ttl - time.time(), 1.0)
    found = fleet.about(said.run_id, line.node, said.src_node_id, left, said.message_id)
    found.dst_task_id = said.src_task_id
    return found


def _send(line: Line, said: Any, answer: fleet.Parcel) -> None:
    """Upload an answer, object by object; raise `Dropped` if the server rejects the answer."""
    pb, me = fleet.proto(), fleet.proto().Node(node_id=line.node)
    request = pb.PushMessagesRequest(
        node=me, messages_list=[answer.message], message_object_trees=[answer.tree], clientapp_runtime_list=[0.0]
    )
    pushed = line.ask("push-messages", request, pb.PushMessagesResponse)
    wanted = set(pushed.objects_to_push)
    for name, content in answer.objects.items():
        if name in wanted:
            one = pb.PushObjectRequest(
                node=me, run_id=said.run_id, object_id=name, object_content=content, session_id=pushed.session_id
            )
            line.ask("push-object", one, pb.PushObjectResponse)


def _read(kind: Any, response: httpx.Response) -> Any:
    found = kind()
    found.ParseFromString(response.content)
    return found


def _reason(error: httpx.TransportError) -> str:
    """Explain a failed request in a network operator's terms."""
    import httpx

    text = str(error).lower()
    if "refused" in text:
        return "the connection was refused; start the server, or correct --superlink"
    if "errno -" in text or "name or service" in text or "name resolution" in text:
        return "its host name does not resolve; correct --superlink, or check this machine's network"
    if isinstance(error, httpx.TimeoutException):
        return "it does not answer; check the network and firewalls"
    if isinstance(error, (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)):
        return "the connection was closed; the server stopped, or the network failed"
    return " ".join(str(error).split())[:200] or type(error).__name__
