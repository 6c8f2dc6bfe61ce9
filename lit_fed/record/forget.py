"""What a run would have been without some clients: what cannot be forgotten exactly, and where to begin again.

A checkpoint is a beginning if nothing in it depends on the clients: no weight, no other client's state, and no metric,
by which callbacks choose. Where the record does not show that, the run begins anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lit_fed.callbacks import Callback, Run
from lit_fed.errors import CheckpointError
from lit_fed.participation import Fate
from lit_fed.protocols import GlobalTest
from lit_fed.record.check import Check
from lit_fed.record.lines import Hashes, leaves


class Forgotten(Callback):
    """Names the run that this one repeats without some clients, in the configuration and so in the record.

    Args:
        run: Name of that run's folder.
        record: SHA-256 of the last line of its record.
    """

    def __init__(self, run: str, record: str) -> None:
        self.run, self.record = run, record

    def on_fit_start(self, run: Run) -> None:
        """Refuse to go on with the state of an absent client.

        Raises:
            CheckpointError: The checkpoint holds one.
        """
        held = run.federation.participation.absent_clients.intersection(run.federation.store.clients())
        if held:
            raise CheckpointError(
                f"{run.origin}, holds a state of client {min(held)}, which is absent; resume from a checkpoint of this "
                "run, or from none"
            )


def obstacle(run: Run, settings: Mapping[str, Any]) -> str | None:
    """Why a run cannot be repeated exactly without a client; None if it can.

    Args:
        run: Assembled with all clients.
        settings: Its configuration.
    """
    data, wrappers, trainer = run.federation.data, run.federation.wrappers, settings["trainer"]
    if wrappers.private:
        return (
            "trainer.privacy: noise that is the same in both runs cancels in their difference, which shows the update, "
            "and no ε is given back; train anew with participation.absent and another key"
        )
    if wrappers.sees_sums_only:
        return "trainer.secure_sum: two sums with and without a client show its update; train anew without it"
    if trainer.get("max_time") is not None:
        return "trainer.max_time ends a run by the clock, which no other run repeats; train anew without the client"
    if trainer.get("client_timeout") is not None and run.settings.on_client_failure == "skip":
        return "trainer.client_timeout leaves out clients by the clock; train anew without the client"
    if (mixed := data.mixed_by) is not None:
        return f"{mixed} lets each client's number of samples choose those of others; train anew without it"
    if (pooled := data.pooled()) is not None:
        return pooled
    files = (name for name, value in leaves(settings["data"], "data") if name.endswith(".normalize") and value)
    if (name := next(files, None)) is not None:
        return f"{name} holds statistics of all clients; take them without the client, and train anew"
    return None


@dataclass(frozen=True)
class Beginning:
    """Where a run without some clients parts from the old one.

    Args:
        round_idx: The first round that may depend on them; the number of rounds if none does.
        why: The reason.
    """

    round_idx: int
    why: str


def beginning(check: Check, whole: Run, rest: Run, clients: Collection[int], settings: Mapping[str, Any]) -> Beginning:
    """Find the first round of a run that depends on some clients.

    Args:
        check: The run's record.
        whole: The run, assembled with all clients.
        rest: The same without them.
        clients: The clients.
        settings: The run's configuration.
    """
    federation, data = whole.federation, whole.federation.data
    if federation.participation.by_data or not federation.participation.one_model:
        return Beginning(0, f"{federation.participation.label} selects clients by the data or the speed of all")
    if settings["trainer"]["executor"] != "sequential":
        return Beginning(0, "trainer.executor pads groups to batches of all clients")
    if data.has_val:
        return Beginning(0, "samples are in the shared validation set")
    if (odd := next(_unlike(whole, rest), None)) is not None:
        return Beginning(0, f"{odd} follows from the samples of all clients")
    asks = data.partition.keeps_clients or any(type(one) is not GlobalTest for one in whole.settings.protocols)
    names = {str(client_id) for client_id in clients}
    for round_idx, line in sorted(check.rounds.items()):
        if any(fate != Fate.LOST_BEFORE.value for name, (fate, _) in line["cohort"].items() if name in names):
            return Beginning(round_idx, "it was selected then")
        if asks and "time/eval_s" in line["metrics"]:
            return Beginning(round_idx, "its test samples were evaluated then")
    return Beginning(len(check.rounds), "none does")


def _unlike(whole: Run, rest: Run) -> Iterator[str]:
    """Parts of two assembled runs that differ: states, and attributes that set-up has left."""
    one, other = _made(whole), _made(rest)
    yield from (name for name in one if one[name] != other.get(name))


def _made(run: Run) -> dict[str, str]:
    parts = {"server": run.federation.server, "algorithm": vars(run.federation.algorithm)}
    parts |= {f"model of kind {kind}": vars(loop.model.task) for kind, loop in run.federation.loops.items()}
    plain = {name: one for name, one in leaves(parts) if isinstance(one, Tensor | int | float | str | None)}
    return Hashes().state(plain)
