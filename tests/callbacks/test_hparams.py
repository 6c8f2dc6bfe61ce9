"""Which settings of which runs TensorBoard's HParams have columns for, and in what words."""

from __future__ import annotations

from lit_fed.callbacks.hparams import columns_of, flatten, hparams_of, settings_of

PROX = """
model: {class_path: lit_fed.tasks.classifier.Classifier, init_args: {network: mlp}}
data: {class_path: Digits, init_args: {partition: {class_path: Dirichlet, init_args: {alpha: 0.3}}}}
trainer: {max_rounds: 2, logger: true}
algorithm: {class_path: lit_fed.methods.fedprox.FedProx, init_args: {mu: 0.01, public_size: 0}}
"""
AVERAGE = """
model: {class_path: lit_fed.tasks.classifier.Classifier, init_args: {network: mlp}}
data: {class_path: Digits, init_args: {partition: {class_path: IID}}}
trainer: {max_rounds: 2, logger: true}
algorithm: {class_path: lit_fed.methods.fedavg.FedAvg, init_args: {public_size: 0}}
"""


def table(config: str) -> dict[str, str | float | int]:
    return hparams_of(settings_of(config))


def test_classes_have_their_last_name_and_the_algorithm_is_the_method() -> None:
    assert list(table(PROX).items()) == [
        ("method", "FedProx"),
        ("model", "Classifier"),
        ("model.network", "mlp"),
        ("data", "Digits"),
        ("data.partition", "Dirichlet"),
        ("data.partition.alpha", 0.3),
        ("trainer.max_rounds", 2),
        ("algorithm.mu", 0.01),
        ("algorithm.public_size", 0),
    ]


def test_the_method_comes_first_then_what_differs_then_what_was_asked_for() -> None:
    columns = columns_of(table(PROX), ("algorithm.class_path", "model.network"), [table(AVERAGE)])
    assert columns == {
        "method": "FedProx",
        "data.partition": "Dirichlet",
        "data.partition.alpha": 0.3,
        "algorithm.mu": 0.01,
        "model.network": "mlp",
    }
    assert list(columns) == ["method", "data.partition", "data.partition.alpha", "algorithm.mu", "model.network"]


def test_a_constant_that_nobody_asked_for_has_no_column() -> None:
    assert list(columns_of(table(PROX), ("algorithm",), [table(PROX)])) == ["method"]
    assert "algorithm.public_size" in columns_of(table(PROX), ("algorithm.public_size",), [])


def test_a_setting_that_only_another_run_has_is_a_column() -> None:
    assert columns_of(table(AVERAGE), (), [table(PROX)])["algorithm.mu"] == 0.01


def test_the_parts_of_a_setting_that_was_asked_for_have_columns() -> None:
    own = hparams_of(flatten({"network_args": {"width": 3, "depth": 2}, "size": 1}))
    assert columns_of(own, ("network_args",), []) == {"network_args.width": 3, "network_args.depth": 2}


def test_flatten_takes_whatever_yaml_gives() -> None:
    assert flatten(None) == {}
    assert flatten({"a": {"b": [], "c": {}}, "d": [[1], [2]], "e": False}) == {
        "a.b": "[]",
        "d.0": "[1]",
        "d.1": "[2]",
        "e": "false",
    }
