"""The mean of networks of several widths."""

import pytest
import torch

from lit_fed.engine.method.model import Model
from lit_fed.engine.wire.payload import ClientUpdate
from lit_fed.methods.data_free.averaging import Decoder, SlotMean, slots
from tests.methods.data_free.support import Halves, three_widths


def made(uniform: bool = False) -> tuple[dict[str, Model], SlotMean]:
    models = {kind: Model(task) for kind, task in three_widths().items()}
    decoders = {kind: Decoder(kind, model, None, "FedGen") for kind, model in models.items()}
    return models, SlotMean(slots(models, decoders), uniform)


def filled(model: Model, value: float, kind: str, weight: float) -> ClientUpdate:
    return ClientUpdate(0, {n: torch.full_like(t, value) for n, t in model.tensors().items()}, weight, kind=kind)


@pytest.mark.parametrize("uniform", [False, True])
def test_equal_shapes_meet_by_name_and_classifiers_always(uniform: bool) -> None:
    # full sends 1 with weight 1, half sends 5 with weight 3, nobody sends a quarter.
    # body.2.bias (2,) and the classifier are the same in all: (1·1 + 3·5)/4 = 4, or (1 + 5)/2 = 3; body.2.weight
    # (2, width) and body.0 (width, 2) only meet their own kind.
    models, mean = made(uniform)
    mean.add(filled(models["full"], 1.0, "full", 1.0))
    mean.add(filled(models["half"], 5.0, "half", 3.0))
    found = {kind: {name: t.flatten()[0].item() for name, t in own.items()} for kind, own in mean.means().items()}
    both = 3.0 if uniform else 4.0
    shared = {"body.2.bias": both, "head.weight": both, "head.bias": both}
    own = ("body.0.weight", "body.0.bias", "body.2.weight")
    assert found == {
        "full": shared | dict.fromkeys(own, 1.0),
        "half": shared | dict.fromkeys(own, 5.0),
        "quarter": shared,
    }


def test_a_classifier_of_another_name_is_still_the_classifier() -> None:
    other = Halves(2)
    other.classify = other.head
    del other.head
    models = {"one": Model(Halves(4)), "other": Model(other)}
    decoders = {
        "one": Decoder("one", models["one"], None, "x"),
        "other": Decoder("other", models["other"], "classify", "x"),
    }
    mean = SlotMean(slots(models, decoders))
    mean.add(filled(models["one"], 1.0, "one", 1.0))
    mean.add(filled(models["other"], 3.0, "other", 1.0))
    assert mean.means()["one"]["head.weight"].unique().tolist() == [2.0]
    assert mean.means()["other"]["classify.weight"].unique().tolist() == [2.0]


def test_the_classifiers_logits_are_those_of_the_tensors_that_are_given() -> None:
    # Weights 1 and bias 0: the sum of the features, in every class.
    model = Model(Halves())
    held = {"head.weight": torch.ones(5, 2), "head.bias": torch.zeros(5), "body.0.bias": torch.zeros(4)}
    decoder = Decoder("model", model, None, "FedGen")
    assert decoder.logits(held, torch.tensor([[1.0, 2.0]])).tolist() == [[3.0] * 5]
    assert decoder.num_features == 2
    assert decoder.tensors(held).keys() == {"head.weight", "head.bias"}
