"""The metric that chooses the best round: on validation data where there are any, else on the test set, said once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lit_fed.engine.lightning.metric_names import ON_VALIDATION
from lit_fed.engine.loop.run import Run

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
                validated |= protocols.pop(name).run(run.federation, round_idx, "val").metrics
    return validated
