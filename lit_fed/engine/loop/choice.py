"""The metric that chooses the best round: on validation data where there are any, else on the test set, said once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from itertools import islice

from lit_fed.engine.evaluation.protocols import run_protocol
from lit_fed.engine.lightning.metric_names import ON_VALIDATION
from lit_fed.engine.loop.run import Run
from lit_fed.engine.vectorized.alone import aside
from lit_fed.errors import ConfigError
from lit_fed.patterns import unknown_name

_STAGES = ("val", "test")  # prefixes of a task's own names, which the record does not have
_BY_DEFAULT = ("global", "clients")  # protocols whose metrics may choose, see `MetricNames.best_of`


def choose(run: Run, round_idx: int, tested: Mapping[str, float]) -> dict[str, float]:
    """Evaluate on validation data what callbacks choose by, and name the metric that chooses by default.

    Only protocols that may choose run again, and none if no callback chooses. Called on every process.

    Args:
        run: The run.
        round_idx: The evaluated round.
        tested: The round's metrics of all protocols.

    Returns:
        Metrics on validation data by name, such as ``val/global/acc``.
    """
    names, on_test = run.names, run.settings.evaluate_on == "test"
    monitors = list(dict.fromkeys(callback.monitor for callback in run.callbacks if callback.monitor is not None))
    why = _why_not(run)
    validated = _validated(run, round_idx, monitors) if on_test and why is None else {}
    run.learn_names(tested)
    if names.choice is None:
        best = names.best_of(validated)
        names.choice = names.monitor if best is None else f"{ON_VALIDATION}{best}"
    for monitor in monitors:
        name = names.choice if monitor == "auto" else monitor
        if run.federation.wrappers.private and name is not None and not (on_test and name.startswith("global")):
            if not run.withholds:
                run.tell(f"{name} tells of clients' own data and chooses the best round, which ε does not count")
        elif on_test and name in tested:
            given = f"a monitor names it, and {ON_VALIDATION}{name} is on validation data"
            because = why or ("no protocol has a metric on validation data" if monitor == "auto" else given)
            run.tell(f"the test set chooses the best round, by {name}: {because}")
    return {f"{ON_VALIDATION}{name}": value for name, value in validated.items()}


def check_monitors(run: Run) -> None:
    """Refuse, before any training, monitors that name no metric of the protocols.

    The names are those that the model declares, and logs of one batch of its initial weights; nothing is evaluated if
    no callback names a monitor. A monitor of another source, such as a method's step, is checked in its round.
    """
    named = [(type(one).__name__, one.monitor) for one in run.callbacks if one.monitor not in (None, "auto")]
    if not named or not (logged := _logged(run)):
        return
    promised = {one.name: one.promises(run.federation, logged) for one in run.settings.protocols}
    known = [name for names in promised.values() for name in names or ()]
    on_test, why = run.settings.evaluate_on == "test", _why_not(run)
    if run.withholds:
        known = [name for name in known if on_test and name.startswith("global")]
    for owner, monitor in named:
        key, validates = f"{owner}.monitor", on_test and monitor.startswith(ON_VALIDATION)
        name = monitor.removeprefix(ON_VALIDATION) if validates else monitor
        if name in known and not (validates and why):
            continue
        prefix, _, rest = name.partition("/")
        if name in known:
            raise ConfigError(f"{key} is {monitor!r}, and {why}")
        if not rest or promised.get(prefix) is not None or prefix in _STAGES or get_close_matches(name, known, 1, 0.9):
            raise unknown_name(key, monitor, "metric of this run is called so", known)


def _logged(run: Run) -> list[str]:
    """Names that the model declares, and logs of one batch; empty where no batch can be evaluated."""
    data, subset, found = run.federation.data, run.settings.evaluate_on, list[str]()
    with run.federation.session.at_work():
        for loop in run.federation.loops.values():
            with aside(loop):  # the task's own code may count its calls
                try:
                    batches = islice(data.test_loader() if subset == "test" else data.val_loader(), 1)
                    found += loop.evaluate(list(batches), subset)
                except Exception:  # of any kind: the first evaluation names it
                    return []
    return list(dict.fromkeys([*found, *run.names.promised])) if found else []


def _why_not(run: Run) -> str | None:
    """Why validation data do not choose; None if they do."""
    data = run.federation.data
    if run.federation.wrappers.private:
        return "under trainer.privacy the validation data are the clients' own"
    if not data.has_val:
        return f"there are no validation data; set data.init_args.val_fraction above {data.val_fraction:g}"
    return None


def _validated(run: Run, round_idx: int, monitors: Iterable[str]) -> dict[str, float]:
    """Metrics on validation data of the protocols that monitors name, and of those that may choose by default."""
    protocols, validated = {protocol.name: protocol for protocol in run.settings.protocols}, dict[str, float]()
    for monitor in sorted(monitors, key=lambda name: name != "auto"):
        prefix = monitor.removeprefix(ON_VALIDATION).partition("/")[0]
        named = [prefix if prefix in protocols else prefix.partition("_")[0]]  # ``global_<kind>`` is of ``global``
        for name in _BY_DEFAULT if monitor == "auto" else named if monitor.startswith(ON_VALIDATION) else ():
            if name in protocols:
                validated |= run_protocol(protocols.pop(name), run.federation, round_idx, "val").metrics
    return validated
