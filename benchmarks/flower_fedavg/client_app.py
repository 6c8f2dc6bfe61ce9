"""A client of Flower's quickstart."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from .task import network, samples, train

app = ClientApp()


@app.train()  # type: ignore[untyped-decorator]  # flwr is not installed where types are checked
def train_here(message: Message, context: Context) -> Message:
    """Train on this node's samples."""
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    images, labels = samples(str(context.node_config["data"]), "train")
    loss = train(model, images, labels, epochs=5, lr=float(message.content["config"]["lr"]), batch_size=20)
    found = MetricRecord({"train_loss": loss, "num-examples": len(labels)})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": found}), reply_to=message)
