"""``lit-fed node``: serve some clients of a federation, where their data are."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser

from lit_fed.command.command import Call
from lit_fed.command.reading.config_files import ConfigFiles
from lit_fed.command.reading.own import add_clients, chosen
from lit_fed.command.reading.words import CommandLine
from lit_fed.data.population.naming import called
from lit_fed.errors import ConfigError
from lit_fed.federation.audit import Copy, audit_log, hash_of
from lit_fed.federation.commands.deployed import add_run, make, make_data, signing_key
from lit_fed.federation.ends import check_public, keep_private, log_line, proxy_of, sole_user
from lit_fed.federation.keys.passphrase import read_passphrase
from lit_fed.federation.messages.wire import MOST_BYTES
from lit_fed.federation.node import approval
from lit_fed.federation.node.audited import AuditedNode
from lit_fed.federation.node.node import Node
from lit_fed.federation.node.standing import Standing
from lit_fed.federation.node.status import watched
from lit_fed.federation.node.summing import signer_of
from lit_fed.federation.node.withheld import Report, check_least
from lit_fed.federation.statistics.over_nodes import StatisticsNode
from lit_fed.federation.transport.calling import serve
from lit_fed.federation.transport.security import Security
from lit_fed.federation.transport.status_port import StatusPort


@dataclass(frozen=True)
class _Options:
    """Options of a node.

    Args:
        server: address of the server
        state_dir: folder for the clients' states
        histogram: report the number of samples of every class too
        report: report metrics of each client, or only their aggregate
        report_least: smallest number of clients whose sum is reported, with aggregate
        statistics: answer `lit-fed statistics` and nothing else: smallest number of samples that a count may tell of
        most_bytes: size of the largest message received
        ca: certificate of the authority, for TLS
        certificate: this node's certificate, for TLS
        key: private key of the node's certificate
        key_passphrase_file: file with the passphrase of an encrypted key
        proxy: URL of an HTTP proxy, or environment for that of https_proxy
        peers: list of the keys of all nodes of secure sums, this one's included
        smallest_sum: smallest number of nodes with clients in a secure sum; by default trainer.secure_sum.threshold
        log: where a copy of each line of the audit log goes, beside its file
        until_done: end with status 0 once the server says that the run is done, and its end is saved here
        approved: hash of the configuration that this site approves, for starts without a question
        standing: folder of configurations; start the approved one that a server names by its hash, run after run
        trust: packages, separated by commas, whose classes this site trusts beside lit_fed, torch.nn and torch.optim
    """

    server: str = "127.0.0.1:9092"
    state_dir: str = "lit_fed_node"
    histogram: bool = True
    report: Report = "clients"
    report_least: int = 2
    statistics: int | None = None
    most_bytes: int = MOST_BYTES
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    key_passphrase_file: str | None = None
    proxy: str | None = None
    peers: str | None = None
    smallest_sum: int | None = None
    log: Copy | None = None
    until_done: bool = False
    approved: str | None = None
    standing: str | None = None
    trust: str | None = None


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of a run, and of the clients on this node."""
    add_run(parser)  # the data are enough for statistics
    add_clients(parser, "clients on this node")
    parser.add_class_arguments(_Options, as_group=False)
    parser.add_class_arguments(StatusPort, as_group=False)
    parser.add_argument(
        "--approve", type=bool, nargs="?", const=True, default=False, help="print what the configuration does, and ask"
    )


def admit(words: Sequence[str], files: ConfigFiles, parser: ArgumentParser) -> None:
    """Refuse a configuration that this site has not approved, before anything that it names is imported."""
    approval.admit(words, files, parser, asdict(_Options()))


def make_node(call: Call, security: Security) -> Node:
    """Make the node that the settings describe."""
    settings = call.settings
    trainer, parts = make(call)
    clients, folder = chosen(parts.data, settings), Path(settings.state_dir) / "states"
    if clients is None:
        raise ConfigError("--client is missing; see lit-fed node --help")
    return Node(
        trainer, *parts, clients, folder, settings.histogram, settings.most_bytes, settings.report,
        settings.report_least, log_line, signer_of(trainer, settings.key, settings.peers, security.passphrase),
        settings.smallest_sum, signing_key(trainer, security),
    )  # fmt: skip


def make_statistics_node(call: Call) -> StatisticsNode:
    """Make the node that answers statistics alone."""
    settings, made = call.settings, make_data(call)
    if (clients := chosen(made.data, settings)) is None:
        raise ConfigError("--client is missing; see lit-fed node --help")
    if settings.until_done or settings.status_port is not None:
        raise ConfigError(
            "--until_done and --status_port are for a run, and a node with --statistics has none; leave them out"
        )
    together = settings.report == "aggregate"
    if together:
        check_least(settings.report_least, len(clients), "statistics")
    return StatisticsNode(
        made.data, clients, made.config, settings.statistics, made.noise, together, settings.most_bytes, log_line
    )


def make_standing_node(call: Call, security: Security) -> Standing:
    """Make the node that starts each approved configuration that a server names."""
    if call.settings.until_done or call.settings.status_port is not None:
        raise ConfigError("--until_done and --status_port are for one run; leave them out with --standing")
    if call.settings.statistics is not None:
        raise ConfigError("--statistics answers nothing else, and --standing trains; start a node for each")

    def start(path: Path) -> Node:
        words, files = ["node", f"--config={path}", *call.words[1:]], ConfigFiles()
        admit(words, files, call.parser)
        return make_node(Call(CommandLine(words, files).parse(call.parser), call.parser, words), security)

    return Standing(Path(call.settings.standing), start, call.settings.most_bytes, log_line)


def run(call: Call) -> int:
    """Serve until Ctrl-C or, with ``--until_done``, the end of the run."""
    settings = call.settings
    if settings.standing is not None and settings.approve:
        return 0
    check_public(settings.server)
    keep_private()
    passphrase, proxy = read_passphrase(settings.key_passphrase_file), proxy_of(settings.proxy)
    security = Security(settings.ca, settings.certificate, settings.key, passphrase)
    security.check(settings.server)
    with suppress(KeyboardInterrupt), sole_user(Path(settings.state_dir), "--state_dir"):
        node: Node | StatisticsNode | Standing
        facts: dict[str, Any] = {"approvals": approval.kept(settings.state_dir, settings.key, settings.approved)}
        if settings.standing is not None:
            node = make_standing_node(call, security)
            log_line(f"waiting for runs of {settings.server} with configurations in {node.folder}; Ctrl-C ends it")
        else:
            node = make_node(call, security) if settings.statistics is None else make_statistics_node(call)
            data = node.federation.data if isinstance(node, Node) else node.data
            who = ", ".join(called(data, client_id) for client_id in node.clients)
            log_line(f"client{'s' if len(node.clients) > 1 else ''} {who} of {settings.server}; Ctrl-C ends it")
            facts |= {"settings": hash_of(node.settings), "clients": node.clients}
        with audit_log(Path(settings.state_dir) / "audit", settings.log, **facts) as audit:
            watch = partial(watched, node, settings)
            serve(AuditedNode(node, audit), settings.server, security, proxy, settings.until_done, watch)
    return 0
