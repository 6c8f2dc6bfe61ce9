"""A bound, a budget, and a key from which noise and draws follow: the common part of both levels of privacy."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_fed.checks import check_range
from lit_fed.engine.evaluation.protocols import Protocol
from lit_fed.engine.method.wrapper import Privacy, WrappedRun
from lit_fed.errors import ConfigError
from lit_fed.privacy.accounting import check_installed
from lit_fed.privacy.keys import RunKey

if TYPE_CHECKING:
    from lit_fed.data.population.census import ClientReport

_KEY, _SEED = "a key file", "the seed: a simulation"


class Keyed(Privacy):
    """A bound, a budget and a key.

    Args:
        clip_norm: C, the bound.
        noise_multiplier: z. Give this or ``epsilon``.
        epsilon: The budget, for which z is worked out.
        delta: δ.
        key_file: The file that holds the run's key; None for a simulation.
        withhold: Whether data that are not private are kept out of files; by default where there is a key file.
    """

    def __init__(
        self,
        clip_norm: float,
        noise_multiplier: float | None = None,
        epsilon: float | None = None,
        delta: float = 1e-5,
        key_file: str | None = None,
        withhold: bool | None = None,
    ) -> None:
        self.clip_norm = check_range("trainer.privacy.clip_norm", clip_norm, above=0)
        self.noise_multiplier = check_range(
            "trainer.privacy.noise_multiplier", noise_multiplier, least=0, null="with epsilon"
        )
        self.epsilon = check_range("trainer.privacy.epsilon", epsilon, above=0, null="with noise_multiplier")
        self.delta = check_range("trainer.privacy.delta", delta, above=0, below=1)
        if (noise_multiplier is None) == (epsilon is None):
            raise ConfigError(
                f"trainer.privacy has noise_multiplier {noise_multiplier} and epsilon {epsilon}; give exactly one"
            )
        self.key_file = key_file
        self.withhold = key_file is not None if withhold is None else withhold
        self._key: RunKey | None = None

    @property
    def _noise_from(self) -> str:
        return _SEED if self.key_file is None else _KEY

    @property
    def _opened(self) -> RunKey:
        assert self._key is not None, "`prepare` opens it"
        return self._key

    def _check_parts(self, run: WrappedRun) -> None:
        """Refuse pooled data, several kinds of network, and buffers that are averaged."""
        if (why := run.data.pooled()) is not None:
            raise ConfigError(f"trainer.privacy: {why}")
        run.check_kinds("trainer.privacy")
        if run.averaged:
            raise ConfigError(
                f"trainer.privacy: the model has buffers that are averaged, such as {min(run.averaged)!r}; set "
                "trainer.buffers to local or server"
            )

    def _check_rounds(self, run: WrappedRun) -> None:
        """Refuse cohorts that no account covers, and protocols that send tensors beside the updates."""
        participation = run.participation
        if not participation.one_model or participation.by_data:
            why = "draws clients by their data" if participation.by_data else "lets each client work in its own time"
            raise ConfigError(
                f"trainer.privacy cannot account for {participation.label}, which {why}; take PoissonParticipation"
            )
        if participation.stragglers is not None and participation.stragglers.late == "next_round":
            raise ConfigError(
                "trainer.privacy accounts for a round's own cohort, and participation.stragglers.late is next_round; "
                "set it to lost"
            )
        if odd := [type(one).__name__ for one in run.protocols if type(one).layout is not Protocol.layout]:
            raise ConfigError(
                f"trainer.protocols has {odd[0]}, for which clients send tensors past trainer.privacy; leave it out"
            )

    def _open(self, run: WrappedRun, resumed: bool) -> None:
        """Open the key; the first process alone reads its file."""
        if (file := self.key_file) is None:
            self._key = RunKey.of_seed(run.seed)
            return
        self._key = key = run.first(lambda: RunKey.of_file(Path(file)))
        if key.releases and not resumed:
            raise ConfigError(
                f"trainer.privacy.key_file {file} was used by a run before; name another, or go on with that run by "
                "--ckpt_path"
            )

    def _check_node(self, run: WrappedRun) -> None:
        """Refuse a node without a key, and protocols by which it tells of its clients' data."""
        if self.key_file is None:
            raise ConfigError(
                "trainer.privacy.key_file is null, and whoever has trainer.seed could remove this node's noise; name a "
                "file of this node"
            )
        check_installed()
        asking = [type(one).__name__ for one in run.protocols if type(one).answer is not Protocol.answer]
        if self.withhold and asking:
            raise ConfigError(
                f"trainer.protocols has {asking[0]}, by which this node tells of its clients' data past "
                "trainer.privacy; leave it out on both ends, or set trainer.privacy.withhold to false"
            )

    def _promised(self, file: Path, promise: Mapping[str, Any]) -> RunKey:
        """The key of a node's file, which also holds an account; refuse a file of other settings."""
        key = RunKey.of_file(file, promise)
        if odd := [name for name, value in promise.items() if key.promise.get(name) != value]:
            raise ConfigError(
                f"trainer.privacy.key_file {file} holds an account with {odd[0]} {key.promise.get(odd[0])}, and "
                f"this node has {promise[odd[0]]}; restore that, or name a new file, whose budget adds to the old"
            )
        return key

    def _hidden(self, report: ClientReport, key: RunKey) -> ClientReport:
        """Without counts of classes, and with a keyed fingerprint: by another, anybody could test a guess at data."""
        sealed = key.seal([report.fingerprint.encode()])
        histogram = None if self.withhold else report.histogram
        return replace(report, histogram=histogram, fingerprint=hashlib.sha256(sealed.encode()).hexdigest())

    def _write_down(self, first: Callable[[Callable[[], Any]], Any], name: str, round_idx: int, exceeds: bool) -> None:
        """Write a new release into the key's file, on the first process, unless it exceeds the budget."""
        key = self._opened
        if exceeds:
            raise ConfigError(
                f"round {round_idx} was released before and comes out differently now; releasing it again would exceed "
                f"trainer.privacy.epsilon {self.epsilon}, so that the run ends here"
            )
        first(lambda: key.record(name, round_idx))
        key.releases[name] = round_idx

    def _check_settings(self, kept: Mapping[str, Any]) -> None:
        """Refuse to go on with other settings."""
        now = {
            "clip_norm": self.clip_norm, "delta": self.delta, "epsilon": self.epsilon or 0.0,
            **({"noise_multiplier": self.noise_multiplier} if self.epsilon is None else {}),
        }  # fmt: skip
        for name, value in now.items():
            if (begun := kept["_budget" if name == "epsilon" else name]) != value:
                raise ConfigError(
                    f"trainer.privacy.{name} is {value or None}, and the run began with {begun or None}; keep it"
                )

    def _take_key(self, run: WrappedRun, kept: dict[str, Any]) -> None:
        """Draw cohorts by the key, if it has a file; refuse a key other than the run's first."""
        key = self._opened
        if (kept["noise_from"] == _KEY) != (key.path is not None):
            raise ConfigError(
                f"trainer.privacy.key_file is {self.key_file}, and the noise of the run so far came from "
                f"{kept['noise_from']}; keep it"
            )
        if key.path is None:
            return
        if kept["_key"] and kept["_key"] != key.name:
            raise ConfigError(
                f"trainer.privacy.key_file {key.path} holds another key than the run began with; name that one"
            )
        kept["_key"] = key.name
        run.participation.reseed(key.seed("cohort"))

    def seal(self, content: Iterable[bytes]) -> str:
        """See `Wrapper.seal`: by the run's key; a `ConfigError` before `prepare`."""
        if self._key is None:
            raise ConfigError(
                "trainer.privacy: this trainer has not trained, and has no key; copy the checkpoint's file"
            )
        return self._key.seal(content)

    def closing_line(self, kept: Mapping[str, Any]) -> str:
        """The budget spent, and whom it protects."""
        line = f"privacy     epsilon {kept['epsilon']} at delta {kept['delta']:g} for {kept['unit']}"
        if self.key_file is not None:
            return line
        return f"{line}; a simulation that protects nobody, as noise and cohorts follow from trainer.seed"
