"""A bound, a budget, and a key from which noise and draws follow: the common part of both levels of privacy."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.engine.evaluation.protocols import Protocol
from lit_fed.engine.method.wrapper import Privacy, WrapperState
from lit_fed.engine.wire.workers import on_first_process
from lit_fed.errors import ConfigError
from lit_fed.privacy.accounting import Releases, check_installed
from lit_fed.privacy.keys import RunKey

if TYPE_CHECKING:
    from lit_fed.data.population.census import ClientReport

_KEY, _SEED = "a key file", "the seed: a simulation"


@dataclass(kw_only=True)
class PrivacyState(WrapperState):
    """The promise of a run, as its card has it, and what it needs to go on.

    Args:
        key: Name of the run's key; empty for a simulation.
        budget: ε that the noise was worked out for; 0 without.
        allowed: Number of rounds that it was worked out for; 0 before.
    """

    unlisted = frozenset({"key", "budget", "allowed"})
    mechanism: str
    unit: str
    relation: str = ""
    accountant: str = ""
    clip_norm: float
    noise_multiplier: float = 0.0
    releases: int = 0
    epsilon: str = "0"
    delta: float
    on_client_failure: str = ""
    noise_from: str
    key: str = ""
    budget: float
    allowed: int = 0


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
        self._node_keys: dict[int, RunKey] = {}
        """The key of each client of a node, where clients have keys of their own."""

    state: PrivacyState

    def _settings(self) -> dict[str, Any]:
        """The settings that a run keeps, as fields of its state."""
        settings = {
            "clip_norm": self.clip_norm, "delta": self.delta, "budget": self.epsilon or 0.0,
            "noise_from": _SEED if self.key_file is None else _KEY,
        }  # fmt: skip
        noise = self.noise_multiplier
        return settings if noise is None else settings | {"noise_multiplier": float(noise)}

    @property
    def _opened(self) -> RunKey:
        assert self._key is not None, "`prepare` opens it"
        return self._key

    @override
    def setup(self) -> None:
        run, participation = self.run, self.run.participation
        if (why := run.data.pooled() or run.data.given_to_model) is not None:
            raise ConfigError(f"trainer.privacy: {why}")
        run.check_kinds("trainer.privacy")
        if run.averaged:
            raise ConfigError(
                f"trainer.privacy: the model has buffers that are averaged, such as {min(run.averaged)!r}; set "
                "trainer.buffers to local or server"
            )
        run.check_sends("trainer.privacy", "protect")
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

    def prepare(self, resumed: bool) -> None:
        """Open the key; the first process alone reads its file.

        Raises:
            ConfigError: If it cannot be read, another run has used it, or the accountant is not installed.
        """
        check_installed()
        if (file := self.key_file) is None:
            self._key = RunKey.of_seed(self.run.seed)
            return
        self._key = key = on_first_process(self.run.fabric, lambda: RunKey.of_file(Path(file)))
        if key.releases and not resumed:
            raise ConfigError(
                f"trainer.privacy.key_file {file} was used by a run before; name another, or go on with that run by "
                "--ckpt_path"
            )

    def _check_node(self) -> None:
        """Refuse a node without a key, and protocols by which it tells of its clients' data."""
        if self.key_file is None:
            raise ConfigError(
                "trainer.privacy.key_file is null, and whoever has trainer.seed could remove this node's noise; name a "
                "file of this node"
            )
        check_installed()
        asking = [type(one).__name__ for one in self.run.protocols if type(one).answer is not Protocol.answer]
        if self.withhold and asking:
            raise ConfigError(
                f"trainer.protocols has {asking[0]}, by which this node tells of its clients' data past "
                "trainer.privacy; leave it out on both ends, or set trainer.privacy.withhold to false"
            )

    def _node_noise(self, files: Iterable[Path], calibrated: Callable[[], float]) -> float:
        """A node's z: as set, as its account began with, whatever trainer.max_rounds is now, or worked out."""
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        begun = [RunKey.of_file(file).promise.get("noise_multiplier") for file in files if file.exists()]
        return calibrated() if not begun or begun[0] is None else float(begun[0])

    def _node_key(self, file: Path, noise_multiplier: float, **promise: Any) -> RunKey:
        """The key of a node's file, which also holds an account; refuse a file of other settings."""
        promise = {
            "clip_norm": self.clip_norm, "noise_multiplier": noise_multiplier, "epsilon": self.epsilon,
            "delta": self.delta, **promise,
        }  # fmt: skip
        key = RunKey.of_file(file, promise)
        if odd := [name for name, value in promise.items() if key.promise.get(name) != value]:
            raise ConfigError(
                f"trainer.privacy.key_file {file} holds an account with {odd[0]} {key.promise.get(odd[0])}, and "
                f"this node has {promise[odd[0]]}; restore that, or name a new file, whose budget adds to the old"
            )
        return key

    def report(self, report: ClientReport, client_id: int) -> ClientReport:
        """Without counts of classes, and with a keyed fingerprint: by another, anybody could test a guess at data."""
        if (key := self._node_keys.get(client_id, self._key)) is None:
            return report
        sealed = key.seal([report.fingerprint.encode()])
        histogram = None if self.withhold else report.histogram
        return replace(report, histogram=histogram, fingerprint=hashlib.sha256(sealed.encode()).hexdigest())

    def _exceeds(self, round_idx: int) -> bool:
        """Whether another release of a round would exceed the budget."""
        raise NotImplementedError

    def _repeats(self, more: int | None = None) -> Releases:
        """Number of rounds by number of releases in the key's file; with one more of a round, where one is given."""
        rounds = [*self._opened.releases.values(), *([] if more is None else [more])]
        return Counter(Counter(rounds).values())

    def _record(self, name: str, round_idx: int) -> bool:
        """Count a release, written into the key's file before anybody sees it; whether the file has a new one."""
        key = self._opened
        if key.path is None:
            self.state.releases += 1
            return False
        if is_new := name not in key.releases:
            if self._exceeds(round_idx):
                raise ConfigError(
                    f"round {round_idx} was released before and comes out differently now; releasing it again would "
                    f"exceed trainer.privacy.epsilon {self.epsilon}, so that the run ends here"
                )
            on_first_process(self.run.fabric, lambda: key.record(name, round_idx))
            key.releases[name] = round_idx
        self.state.releases = len(key.releases)  # a run that resumes an older checkpoint has made more
        return is_new

    def begin(self) -> None:
        """Refuse other settings and another key than the run began with; draw cohorts by the key of a file."""
        state, key, settings = self.state, self._opened, self._settings()
        noise_from, state.on_client_failure = settings.pop("noise_from"), self.run.on_client_failure
        for field, value in settings.items():
            if value != (begun := getattr(state, field)):
                name = "epsilon" if field == "budget" else field
                raise ConfigError(
                    f"trainer.privacy.{name} is {value or None}, and the run began with {begun or None}; keep it"
                )
        if noise_from != state.noise_from:
            raise ConfigError(
                f"trainer.privacy.key_file is {self.key_file}, and the noise of the run so far came from "
                f"{state.noise_from}; keep it"
            )
        if key.path is None:
            return
        if state.key and state.key != key.name:
            raise ConfigError(
                f"trainer.privacy.key_file {key.path} holds another key than the run began with; name that one"
            )
        state.key = key.name
        self.run.participation.reseed(key.seed("cohort"))

    def seal(self, content: Iterable[bytes]) -> str:
        """See `Wrapper.seal`: by the run's key; a `ConfigError` before `prepare`."""
        if self._key is None:
            raise ConfigError(
                "trainer.privacy: this trainer has not trained, and has no key; copy the checkpoint's file"
            )
        return self._key.seal(content)

    def _warn_of_delta(self, count: int, breach: str) -> None:
        """Warn of a δ by which the data of one of so many may be published."""
        if self.delta > 1 / max(1, count):
            self.run.fabric.print(
                f"warning: trainer.privacy.delta is {self.delta}, above 1/{count}: that allows {breach} to be "
                "published outright; give less"
            )

    def closing_line(self) -> str:
        """The budget spent, and whom it protects."""
        line = f"privacy     epsilon {self.state.epsilon} at delta {self.state.delta:g} for {self.state.unit}"
        if self.key_file is not None:
            return line
        return f"{line}; a simulation that protects nobody, as noise and cohorts follow from trainer.seed"
