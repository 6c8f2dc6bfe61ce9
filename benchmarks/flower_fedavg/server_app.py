"""The server of Flower's quickstart: its FedAvg, and a test after every round."""

from __future__ import annotations

from flwr.app import ArrayRecord, ConfigRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from .marks import mark
from .task import accuracy, network, samples

app = ServerApp()


@app.main()  # type: ignore[untyped-decorator]  # flwr is not installed where types are checked
def main(grid: Grid, context: Context) -> None:
    """Let FedAvg work."""
    config = context.run_config
    images, labels = samples(str(config["data"]), "test")
    model = network()

    def test(_round: int, arrays: ArrayRecord) -> MetricRecord:
        model.load_state_dict(arrays.to_torch_state_dict())
        found = accuracy(model, images, labels)
        mark(str(config["marks"]))
        return MetricRecord({"accuracy": found})

    nodes = int(config["nodes"])
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        train_config=ConfigRecord({"lr": 0.1}),
        num_rounds=int(config["rounds"]),
        evaluate_fn=test,
    )
