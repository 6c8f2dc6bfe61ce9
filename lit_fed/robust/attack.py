"""Choice of the attackers, and loaders that change their data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.data.population.naming import Keys, called, clients_of
from lit_fed.engine.evaluation.rows import ClientRow, spread
from lit_fed.engine.method.algorithm import Cohort
from lit_fed.engine.method.wrapper import Attack, Surroundings, Tested
from lit_fed.errors import ConfigError
from lit_fed.seeding import numpy_generator

_KEYS = Keys("trainer.attack.clients", "trainer.attack.positions")
_CHOICES = "trainer.attack.fraction or trainer.attack.clients"
_LISTED = 20


class Attacker(Attack):
    """Clients that attack in every round in which they take part: chosen once, by fraction, name or position.

    Logs ``attack/attackers``, the number of attackers among a round's updates, and marks the attackers in
    ``clients.csv`` by ``attack/attacker``; beside a rule also ``attack/beyond``, the excess over the number that the
    rule bears. Where `lit_fed.protocols.ClientTest` runs, logs its statistics over the other clients as ``honest/…``;
    clients whose nodes withhold their results are not in them.

    Args:
        fraction: Share of the population that attacks, rounded and chosen by the run's seed.
        clients: Names of the attackers, or their numbers if clients have no names.
        positions: Positions of the attackers, from 0.
    """

    def __init__(
        self,
        fraction: float | None = None,
        clients: Sequence[str | int] | None = None,
        positions: Sequence[int] | None = None,
    ) -> None:
        check_range("trainer.attack.fraction", fraction, above=0, below=1, null=f"with {_KEYS.name}")
        if (fraction is None) == (clients is None and positions is None):
            found = "no choice" if fraction is None else "two choices"
            raise ConfigError(f"trainer.attack has {found} of attackers; give either {_CHOICES}")
        self.fraction, self.clients, self.positions = fraction, clients, positions
        self.attackers: frozenset[int] = frozenset()
        self._delivered: list[int] = []

    @override
    def setup(self, around: Surroundings) -> dict[str, Any]:
        data = around.data
        chosen = clients_of(data, _KEYS, self.clients, self.positions)
        if chosen is None:
            count = round((self.fraction or 0) * data.num_clients)
            chosen = numpy_generator(around.seed, "attackers").permutation(data.num_clients)[:count].tolist()
        if not chosen:
            raise ConfigError(f"trainer.attack chooses none of {data.num_clients} clients; give {_CHOICES}")
        self.attackers = frozenset(chosen)
        self._bears, self._say, self._told_beyond = around.bears, around.say, False
        names = [called(data, client_id) for client_id in sorted(self.attackers)]
        more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
        return {"attack": type(self).__name__, "attackers": ", ".join(names[:_LISTED]) + more}

    @override
    def release(self, aggregate: Any, cohort: Cohort, kept: dict[str, Any]) -> tuple[Any, Cohort, dict[str, float]]:
        self._delivered = [client_id for client_id in cohort.delivered if client_id in self.attackers]
        metrics = {"attack/attackers": float(count := len(self._delivered))}
        if self._bears is not None:
            metrics["attack/beyond"] = float(max(0, count - self._bears))
            if count > self._bears and not self._told_beyond:
                self._told_beyond = True
                self._say(
                    f"round {cohort.round_idx}: {count} of {len(cohort.delivered)} updates are attackers', and the "
                    f"rule bears {self._bears}; attack/beyond counts such rounds; select more clients, or raise its "
                    "attackers"
                )
        return aggregate, cohort, metrics

    @override
    def measured(self, tests: Sequence[Tested]) -> dict[str, float]:
        honest = [ClientRow(*test) for test in tests if test[0] not in self.attackers and test[1] == "test"]
        return spread("honest", honest)

    @override
    def told(self) -> list[tuple[int, str, float]]:
        return [(client_id, "attack/attacker", 1.0) for client_id in self._delivered]


class ChangedLoader:
    """A loader whose batches are changed.

    Args:
        loader: The loader.
        change: Gives a batch for a batch.
    """

    def __init__(self, loader: Any, change: Callable[[Any], Any]) -> None:
        self._loader, self._change = loader, change

    def __iter__(self) -> Iterator[Any]:
        return map(self._change, self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
