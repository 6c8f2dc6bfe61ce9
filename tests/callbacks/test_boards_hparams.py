"""Which settings of which runs TensorBoard's HParams have columns for, and in what words."""

from __future__ import annotations

from lit_fed.callbacks.boards import columns_of, flatten, hparams_of, settings_of

PROX = """
model: {class_path: lit_fed.tasks.on_network.Classifier, init_args: {network: mlp}}
data: {class_path: Digits, init_args: {partition: {class_path: Dirichlet, init_args: {alpha: 0.3}}}}
trainer: {max_rounds: 2, logger: true}
algorithm: {class_path: lit_fed.methods.fedprox.FedProx, init_args: {mu: 0.01, public_size: 0}}
"""
AVERAGE = """
model: {class_path: lit_fed.tasks.on_network.Classifier, init_args: {network: mlp}}
data: {class_path: Digits, init_args: {partition: {class_path: IID}}}
trainer: {max_rounds: 2, logger: true}
algorithm: {class_path: lit_fed.methods.fedavg.FedAvg, init_args: {public_size: 0}}
"""


def table(config: str) -> dict[str, str | float | int]:
    return hparams_of(settings_of(config))


def test_classes_have_their_last_name_and_the_algorithm_is_the_method() -> None:
    assert list(table(PROX).items()) == [
        ("_method", "FedProx"),
        ("model", "Classifier"),
        ("model.network", "mlp"),
        ("data", "Digits"),
        ("data.partition", "Dirichlet"),
        ("data.partition.alpha", 0.3),
        ("trainer.max_rounds", 2),
        ("algorithm.mu", 0.01),
        ("algorithm.public_size", 0),
    ]


def test_the_method_and_what_differs_lead_then_comes_what_was_asked_for() -> None:
    told = ("algorithm.class_path", "algorithm.mu", "model.class_path", "model.network", "data.class_path")
    columns = columns_of(table(PROX), told, [table(AVERAGE)])
    assert {name: tuple(column) for name, column in columns.items()} == {
        "_method": ("FedProx", True),
        "data.partition": ("Dirichlet", True),
        "algorithm.mu": (0.01, True),
        "model": ("Classifier", True),
        "model.network": ("mlp", True),  # the fifth
        "data": ("Digits", False),
    }
    assert list(columns)[2:] == ["algorithm.mu", "model", "model.network", "data"]  # as they were asked for, last first


def test_a_constant_that_nobody_asked_for_has_no_column() -> None:
    assert list(columns_of(table(PROX), ("algorithm",), [table(PROX)])) == ["_method"]
    assert "algorithm.public_size" in columns_of(table(PROX), ("algorithm.public_size",), [])


def test_a_setting_that_only_other_runs_have_is_a_column_where_it_differs_between_them() -> None:
    others = [table(PROX), table(PROX.replace("0.01", "0.1"))]
    assert columns_of(table(AVERAGE), (), others)["algorithm.mu"].leads
    assert "algorithm.mu" not in columns_of(table(AVERAGE), (), others[:1])


def test_the_parts_of_a_setting_that_was_asked_for_have_columns() -> None:
    own = hparams_of(flatten({"network_args": {"width": 3, "depth": 2}, "size": 1}))
    assert list(columns_of(own, ("network_args",), [])) == ["network_args.width", "network_args.depth"]


def test_flatten_takes_whatever_yaml_gives() -> None:
    assert flatten(None) == {}
    assert flatten({"a": {"b": [], "c": {}}, "d": [[1], [2]], "e": False}) == {
        "a.b": "[]",
        "d.0": "[1]",
        "d.1": "[2]",
        "e": "false",
    }
