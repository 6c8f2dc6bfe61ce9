"""Options and parts of a run, for the commands of a federation over several machines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jsonargparse import ArgumentParser, Namespace

from lit_fed.command.command import Call
from lit_fed.command.reading.parts import ReadParts, add_parts, build_parts, check_parts_given, instantiate, set_seed
from lit_fed.command.refusals.explain import missing
from lit_fed.command.roots import PARTS
from lit_fed.data import FederatedDataModule
from lit_fed.errors import ConfigError
from lit_fed.federation.ends import log_line
from lit_fed.federation.keys.node_keys import NodeKeys
from lit_fed.federation.keys.passphrase import read_passphrase
from lit_fed.federation.messages.wire import MOST_BYTES
from lit_fed.federation.statistics.noise import Noise
from lit_fed.federation.transport.security import Security
from lit_fed.trainer import FederatedTrainer

if TYPE_CHECKING:
    from lit_fed.federation.keys.statements import SigningKey


def add_run(parser: ArgumentParser) -> None:
    """Add the options of a run: the same as of ``fit``."""
    parser.add_argument("-c", "--config", action="config", help="configuration of the run, the same on every machine")
    add_parts(parser)


@dataclass(frozen=True)
class ServersEnd:
    """The end of the server's connections to nodes.

    Args:
        bind: address to listen at, if it differs from --server
        most_bytes: size of the largest message, sent or received
        ca: certificate of the authority, for TLS
        certificate: the server's certificate, for TLS
        key: private key of the server's certificate
        key_passphrase_file: file with the passphrase of an encrypted key
        node_keys: file of nodes' certificates, each with the clients that the node may serve
        revoked: list of keys that are refused from now on
        crl: authorities' lists of revoked certificates, in PEM or DER
    """

    bind: str | None = None
    most_bytes: int = MOST_BYTES
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    key_passphrase_file: str | None = None
    node_keys: str | None = None
    revoked: str | None = None
    crl: str | None = None


def keys_of(settings: Any) -> tuple[Security, NodeKeys | None]:
    """The server's certificate and keys, and its file of nodes' certificates."""
    if settings.crl is not None and None in (settings.ca, settings.node_keys):
        raise ConfigError("--crl is given without --ca and --node_keys; give all three")
    crl = None if settings.crl is None else (Path(settings.crl), Path(settings.ca))
    node_keys = None if settings.node_keys is None else NodeKeys(settings.node_keys, settings.revoked, log_line, crl)
    passphrase = read_passphrase(settings.key_passphrase_file)
    return Security(settings.ca, settings.certificate, settings.key, passphrase), node_keys


def signing_key(trainer: FederatedTrainer, security: Security) -> SigningKey | None:
    """The key of an end, where the run writes a record and there is TLS."""
    if security.certificate is None or security.key is None or not any(one.keeps_record for one in trainer.callbacks):
        return None
    from lit_fed.federation.keys.statements import SigningKey

    return SigningKey.read(security.ca, security.certificate, security.key, security.passphrase)


def make(call: Call) -> tuple[FederatedTrainer, ReadParts]:
    """Make a trainer with the run's settings, and the run's parts, with initial weights from the run's seed."""
    settings, parser = call.settings, call.parser
    check_parts_given(settings)
    set_seed(settings.trainer)
    parts, rest = build_parts(parser, settings)
    trainer = FederatedTrainer(**rest.trainer)
    trainer.describe(_config(call))
    return trainer, parts


def _config(call: Call) -> str:
    """The settings of the run as YAML, without the command's own."""
    run = {key: call.settings[key] for key in ("trainer", *PARTS) if key in call.settings}
    dumped: str = call.parser.dump(Namespace(**run), skip_unset=False, skip_validation=True)
    return dumped


class MadeData(NamedTuple):
    """The data of a run for statistics, which may have missing numbers, and what statistics need of the rest."""

    data: FederatedDataModule
    noise: Noise | None
    seed: int
    config: str


def make_data(call: Call) -> MadeData:
    """Make the data alone, and set aside what the method asks for if there is one."""
    settings, parser = call.settings, call.parser
    if settings.data is None:
        raise ConfigError(missing(["data"]))
    named = {key: settings[key] for key in ("trainer", "data", "algorithm") if settings.get(key) is not None}
    made = instantiate(parser, Namespace(**named), settings.trainer.get("max_rounds"))
    made.data.keeps_missing = True
    if "algorithm" in named:
        made.data.reserve(made.algorithm.public_size, made.algorithm.calibration_fraction)
    return MadeData(made.data, Noise.from_privacy(made.trainer.privacy), made.trainer.seed, _config(call))
