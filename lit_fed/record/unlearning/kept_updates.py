"""The callback that keeps what clients sent, for methods of approximate unlearning."""

from __future__ import annotations

from safetensors.torch import save_file
from torch import Tensor

import lit_fed.algorithm as fed
from lit_fed.callbacks import Callback, Run, in_place_of
from lit_fed.checks import check_range
from lit_fed.errors import ConfigError
from lit_fed.participation import Participation


class KeptUpdates(Callback):
    """Keeps every update of every k-th round, and what was sent in it, for methods of approximate unlearning.

    Writes ``updates/<r>/sent.safetensors`` in the run's folder, with names ``<kind>/<tensor>``, and an update as it
    came out of the uplink's codec as ``updates/<r>/<client>.safetensors``, for r = 0, k, 2k …. The files tell of single
    clients whatever their updates tell.

    Args:
        every: The interval k of rounds.

    Raises:
        ConfigError: Before training, under privacy and secure sums, which hide updates, and where updates arrive after
            their round.
    """

    def __init__(self, every: int = 1) -> None:
        self.every = check_range("KeptUpdates.every", every, least=1)

    def on_fit_start(self, run: Run) -> None:
        """Refuse runs that hide updates."""
        run.federation.wrappers.check_view("callbacks: KeptUpdates", self, "updates")
        check_on_time(run.federation.participation, "trainer.callbacks: KeptUpdates")

    def on_broadcast(self, run: Run, broadcast: fed.Broadcast) -> None:
        """Write what the round sends."""
        self._round_idx = broadcast.round_idx
        if self._round_idx % self.every == 0 and run.fabric.is_global_zero:
            sent = dict[str, Tensor]()
            for kind, payload in broadcast.payloads.items():
                sent |= fed.add_prefix(f"{kind}/", payload)
            self._write(run, "sent", sent)

    def on_arrival(self, run: Run, update: fed.ClientUpdate) -> None:
        """Write an update."""
        if self._round_idx % self.every == 0:
            self._write(run, str(update.client_id), update.payload)

    def _write(self, run: Run, name: str, payload: fed.Payload) -> None:
        with in_place_of(run.log_dir / "updates" / str(self._round_idx) / f"{name}.safetensors") as temporary:
            save_file({key: tensor.detach().cpu().clone().contiguous() for key, tensor in payload.items()}, temporary)


def check_on_time(participation: Participation, part: str) -> None:
    """Refuse updates that arrive after their round, as they do not start from its model."""
    delays = participation.stragglers is not None and participation.stragglers.late == "next_round"
    if delays or not participation.one_model:
        raise ConfigError(
            f"{part} takes updates that start from the round's model, and under {participation.label} some arrive "
            "after their round; leave one out"
        )
