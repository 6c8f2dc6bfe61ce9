"""The simulated duration of a client's work, a pure function of (seed, client, its data, the payload's bytes)."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist

from lit_fed.arguments import checked_class
from lit_fed.checks import check_range
from lit_fed.errors import ConfigError
from lit_fed.seeding import derive_seed

_KEY = "participation.speeds"
_COLUMNS = ("seconds", "seconds_per_sample", "down_bytes_per_s", "up_bytes_per_s")


@checked_class
@dataclass
class Speeds:
    r"""Virtual seconds from a client's download to the arrival of its update: the same in every round.

    :math:`(s + c \cdot n) / v + b_{\mathrm{down}} / r_{\mathrm{down}} + b_{\mathrm{up}} / r_{\mathrm{up}}` with n the
    client's training samples, b the bytes of the payload after codecs, r the rates of a `trace`, and the log-normal
    speed :math:`v = e^{\sigma z}`, z standard normal, drawn once per client. No real time passes.

    Args:
        seconds: s.
        seconds_per_sample: c, of one round, all local epochs together; a client without samples counts as one sample.
        sigma: σ, the standard deviation of the log-speed (no unit); 0 for equal speeds.
        trace: A CSV file with a row for each client instead: ``client`` (from 0), ``seconds``, and, if you like,
            ``seconds_per_sample``, ``down_bytes_per_s`` and ``up_bytes_per_s``. σ is 0 then.
    """

    seconds: float = 1.0
    seconds_per_sample: float = 0.0
    sigma: float = 0.0
    trace: str | None = None
    _rows: list[tuple[float, float, float, float]] = field(default_factory=list, init=False, repr=False)

    def setup(self, num_clients: int) -> None:
        """Check the settings, and read the trace."""
        check_range(f"{_KEY}.seconds", self.seconds, least=0)
        check_range(f"{_KEY}.seconds_per_sample", self.seconds_per_sample, least=0)
        check_range(f"{_KEY}.sigma", self.sigma, least=0)
        if self.trace is None:
            if not self.seconds + self.seconds_per_sample:
                raise ConfigError(f"{_KEY}: seconds and seconds_per_sample are 0; set one above 0")
        elif (self.seconds, self.seconds_per_sample, self.sigma) != (1.0, 0.0, 0.0):
            raise ConfigError(f"{_KEY} has a trace beside seconds, seconds_per_sample or sigma; leave these out")
        else:
            self._rows = _read(self.trace, num_clients)

    def duration(self, seed: int, client_id: int, num_samples: int, down: int = 0, up: int = 0) -> float:
        """Virtual seconds of a client's work, above 0.

        Args:
            seed: The run's.
            client_id: The client.
            num_samples: Its training samples.
            down: Bytes of its download.
            up: Bytes of its upload.
        """
        seconds, each, down_rate, up_rate = self.seconds, self.seconds_per_sample, math.inf, math.inf
        if self._rows:
            seconds, each, down_rate, up_rate = self._rows[client_id]
        work = (seconds + each * max(num_samples, 1)) / log_normal(self.sigma, seed, client_id)
        return work + down / down_rate + up / up_rate


def log_normal(sigma: float, seed: int, client_id: int) -> float:
    """A client's speed relative to the median client (no unit), the same in every round."""
    return math.exp(sigma * NormalDist().inv_cdf(uniform(seed, "speed", client_id)))


def uniform(seed: int, *keys: int | str) -> float:
    """A number strictly between 0 and 1, from a hash; a generator per client would cost ten times the time."""
    return ((derive_seed(seed, *keys) >> 11) + 0.5) / 2**52


def _read(path: str, num_clients: int) -> list[tuple[float, float, float, float]]:
    """The rows of a trace by client; a rate that is not given is infinite."""
    try:
        with Path(path).open(newline="", encoding="utf-8") as file:
            table = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{_KEY}.trace {path} cannot be read: {error}") from error
    found: dict[int, tuple[float, float, float, float]] = {}
    for number, row in enumerate(table, start=2):
        where = f"{_KEY}.trace {path}, line {number}"
        if odd := sorted(map(str, {"client", "seconds"} - row.keys() | row.keys() - {"client", *_COLUMNS})):
            raise ConfigError(f"{_KEY}.trace {path}: column {odd[0]!r} is missing or unknown; see Speeds")
        try:
            client_id = int(row["client"])
            values = [float(row.get(name) or (0 if name == "seconds_per_sample" else math.inf)) for name in _COLUMNS]
        except (TypeError, ValueError):
            raise ConfigError(f"{where} has a value that is not a number; correct it") from None
        if client_id in found:
            raise ConfigError(f"{where} is a second row of client {client_id}; leave one of them out")
        seconds, each, *rates = values
        if not (0 <= seconds < math.inf and 0 <= each < math.inf and seconds + each > 0 and min(rates) > 0):
            raise ConfigError(f"{where}: the seconds of client {client_id} and its rates must be above 0; correct it")
        found[client_id] = (seconds, each, rates[0], rates[1])
    for client_id in range(num_clients):
        if client_id not in found:
            raise ConfigError(f"{_KEY}.trace {path} has no row for client {client_id}, one of {num_clients}; add it")
    return [found[client_id] for client_id in range(num_clients)]
