"""Secure sums over nodes: a node's end, made from its settings and keys."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lit_fed.checks import check_range
from lit_fed.errors import ConfigError
from lit_fed.federation.ends import Alert
from lit_fed.federation.secure.summed import secure_sum_of

if TYPE_CHECKING:
    from lit_fed.federation.secure.own_work import OwnWork
    from lit_fed.federation.secure.signer import Signer
    from lit_fed.trainer import FederatedTrainer


def own_work(
    trainer: FederatedTrainer,
    signer: Signer | None,
    limit: int,
    report: str,
    say: Callable[[str], object],
    folder: Path,
    smallest: int | None = None,
) -> OwnWork | None:
    """Return a node's part in secure sums; None without them."""
    if (summed := secure_sum_of(trainer)) is None:
        if smallest is not None:
            raise ConfigError(f"--smallest_sum is {smallest}, and trainer.secure_sum is null; leave it out")
        return None
    from lit_fed.federation.keys.authority import new_key, pem_of, read_key, write
    from lit_fed.federation.secure.own_work import OwnWork
    from lit_fed.federation.secure.signer import Signer

    check_range("--smallest_sum", smallest, least=2, null="for trainer.secure_sum.threshold")

    if report == "aggregate":
        raise ConfigError("--report is aggregate, and trainer.secure_sum sums metrics over all nodes; leave it out")
    if (made := signer) is None:
        if not (file := folder / "sums.key").exists():
            write(file, pem_of(new_key()), 0o600)
        made = Signer(read_key(file))
    if made.peers is None:
        alone = "without --ca no node knows the others' keys, and whoever runs the server can pose as them"
        say(Alert(f"trainer.secure_sum: {alone}"))
    elif made.name not in made.peers:
        raise ConfigError(f"--peers lacks this node's own key, {made.name}; use the same list on all nodes")
    return OwnWork(summed, made, limit, smallest, folder)


def signer_of(
    trainer: FederatedTrainer, key: str | None, peers: str | None, passphrase: bytes | None = None
) -> Signer | None:
    """Return what signs a node's part in secure sums: its certificate's key; None without TLS, or without such sums.

    Raises:
        ConfigError: If the list of peers is missing, given in vain, or cannot be read.
    """
    if secure_sum_of(trainer) is None or key is None:
        if peers is not None:
            raise ConfigError(f"--peers is {peers}, and names the nodes of trainer.secure_sum with TLS; leave it out")
        return None
    if peers is None:
        raise ConfigError(
            "--peers is missing; with trainer.secure_sum, give a list of the SHA-256 of all nodes' public keys, see "
            "docs/secure_sums.md"
        )
    from lit_fed.federation.keys.authority import read_key
    from lit_fed.federation.keys.node_keys import read_hashes
    from lit_fed.federation.secure.signer import Signer

    return Signer(read_key(Path(key), passphrase), read_hashes(peers, "--peers"))
