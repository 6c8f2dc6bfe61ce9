"""Distances of pseudo-samples from the real classes, as metrics; no training uses them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import lit_fed.algorithm as fed
from lit_fed.callbacks import Callback, Run, in_place_of
from lit_fed.callbacks.boards import show_picture
from lit_fed.checks import check_range
from lit_fed.data.population.pictures import render
from lit_fed.errors import ConfigError
from lit_fed.methods.data_free.base import DataFree
from lit_fed.methods.data_free.display import map_picture
from lit_fed.networks.generators import LatentGenerator
from lit_fed.protocols import EvalSubset, Evaluation, Federation, Protocol

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_CLASSES = 10  # of a map
_NEIGHBOURS = 30.0  # t-SNE's perplexity


class PseudoTest(Protocol):
    """Compares pseudo-samples with the shared test set, through the global model's encoder, for every kind.

    - ``pseudo/divergence``: the mean of `class_divergences` over classes;
    - ``pseudo/acc``: share of the pseudo-samples that the global model assigns to their intended class.

    With several kinds, ``pseudo_<kind>/…``. Empty before the generator's first training.

    Args:
        samples_per_class: Pseudo-samples per class, at least 2.

    Raises:
        ConfigError: For fewer samples; before training, for a method without a generator.

    Note:
        The server of a real federation has no such test set: the protocol shows whether a generator works, which
        HFedCKD's paper leaves open. The measure is ours.
    """

    name = "pseudo"

    def __init__(self, samples_per_class: int = 32) -> None:
        self.samples_per_class = check_range("PseudoTest.samples_per_class", samples_per_class, least=2)

    def check(self, federation: Federation) -> None:
        """Refuse a method without a generator."""
        _method(federation, "protocol PseudoTest")

    def run(self, federation: Federation, round_idx: int, subset: EvalSubset) -> Evaluation:
        """Compare, identically on every process."""
        method, evaluation = _method(federation, "protocol PseudoTest"), Evaluation()
        if not federation.server["learnt"]:
            evaluation.absent[self.name] = "the generator has not learnt yet"
            return evaluation
        loader = federation.data.test_loader() if subset == "test" else federation.data.val_loader()
        for kind, state in federation.global_models(round_idx).items():
            real, labels = _real(method, federation, kind, state, loader)
            pseudo, logits, pseudo_labels = _pseudo(method, federation, kind, state, self.samples_per_class)
            name = self.name if len(federation.kinds.names) == 1 else f"{self.name}_{kind}"
            divergences = class_divergences(pseudo, pseudo_labels, real, labels, method.num_classes)
            evaluation.metrics[f"{name}/divergence"] = float(divergences.mean())
            evaluation.metrics[f"{name}/acc"] = float((logits.argmax(1) == pseudo_labels).double().mean())
        return evaluation


class PseudoMap(Callback):
    """Draws ``pseudo_map.png`` at the end, in the run's folder and as a picture: a t-SNE of samples and pseudo-samples.

    The first kind's global model computes the features, for the shared test set and the same number of pseudo-samples,
    at most ten classes.

    Args:
        samples_per_class: Largest number of samples per class, real and pseudo each.

    Raises:
        ConfigError: For fewer than 2 samples; before training, for a method without a generator.
    """

    def __init__(self, samples_per_class: int = 30) -> None:
        self.samples_per_class = check_range("PseudoMap.samples_per_class", samples_per_class, least=2)

    def on_fit_start(self, run: Run) -> None:
        """Refuse a method without a generator."""
        _method(run.federation, "callback PseudoMap")

    def on_fit_end(self, run: Run) -> None:
        """Draw, on the first process."""
        if run.next_round and run.fabric.is_global_zero and run.federation.server["learnt"]:
            figure = self.draw(run.federation, run.next_round - 1)
            with in_place_of(run.log_dir / "pseudo_map.png") as temporary:
                figure.savefig(temporary, format="png")
            show_picture(run, "pictures/pseudo_map", render(figure), run.next_round - 1)

    def draw(self, federation: Federation, round_idx: int) -> Figure:
        """The picture after a round."""
        from sklearn.manifold import TSNE  # takes a second

        method, kind = _method(federation, "callback PseudoMap"), federation.kinds.names[0]
        state = federation.global_models(round_idx)[kind]
        real, labels = _real(method, federation, kind, state, federation.data.test_loader())
        pseudo, _, pseudo_labels = _pseudo(method, federation, kind, state, self.samples_per_class)
        kept = torch.cat([
            torch.nonzero(labels == label).flatten()[: self.samples_per_class]
            for label in range(min(method.num_classes, _MOST_CLASSES))
        ])  # fmt: skip
        shown = pseudo_labels < _MOST_CLASSES
        points = torch.cat([real[kept], pseudo[shown]]).float().cpu().numpy()
        neighbours = min(_NEIGHBOURS, (len(points) - 1) / 3)
        places = TSNE(perplexity=neighbours, init="pca", random_state=0).fit_transform(points)
        classes = torch.cat([labels[kept], pseudo_labels[shown]]).cpu().numpy()
        return map_picture(places, classes, len(kept))


def class_divergences(pseudo: Tensor, pseudo_labels: Tensor, real: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    r"""Distance of pseudo-samples to the real samples of their class, in units of the real samples' variance.

    .. math:: D_y = \frac{\|m_y - \mu_y\|^2 + \|s_y - \sigma_y\|^2}{\sum_d \mathrm{Var}(z_d)}

    with mean m and standard deviation s of the pseudo-samples' features of a class, μ and σ of the real ones', and the
    variance of all real features together: Fréchet's distance of normal distributions without correlations.

    Args:
        pseudo: Features of pseudo-samples (n, d).
        pseudo_labels: Their classes (n,).
        real: Features of real samples (m, d).
        labels: Their classes (m,).
        num_classes: C.

    Returns:
        One value for each class with both real and pseudo-samples: 0 for equal distributions. The mean over classes is
        near 1 if pseudo-samples spread over all real samples.
    """
    pseudo, real = pseudo.double(), real.double()
    scale = real.var(dim=0, correction=0).sum().clamp_min(torch.finfo(real.dtype).tiny)
    divergences = []
    for label in range(num_classes):
        pseudo_here, other = pseudo[pseudo_labels == label], real[labels == label]
        if len(pseudo_here) and len(other):
            means = (pseudo_here.mean(0) - other.mean(0)).square().sum()
            spreads = (pseudo_here.std(0, correction=0) - other.std(0, correction=0)).square().sum()
            divergences.append((means + spreads) / scale)
    return torch.stack(divergences)


@torch.no_grad()
def _real(
    method: DataFree[Any], federation: Federation, kind: str, state: fed.Payload, loader: Any
) -> tuple[Tensor, Tensor]:
    """Features and classes of a loader's samples."""
    pairs = [(_encode(method, kind, state, x)[0], y) for x, y in federation.loops[kind].batches(loader)]
    return torch.cat([features for features, _ in pairs]), torch.cat([labels for _, labels in pairs])


@torch.no_grad()
def _pseudo(
    method: DataFree[Any], federation: Federation, kind: str, state: fed.Payload, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Features, logits and classes of pseudo-samples, in order of classes."""
    samples = method.samples_of(federation.server, range(method.num_classes), count).flatten(0, 1)
    pseudo_labels = torch.arange(method.num_classes, device=samples.device).repeat_interleave(count)
    if isinstance(method.pseudo.network, LatentGenerator):
        return samples, method.head_logits(kind, state, samples), pseudo_labels
    features, logits = _encode(method, kind, state, samples)
    return features, logits, pseudo_labels


def _encode(method: DataFree[Any], kind: str, state: fed.Payload, x: Tensor) -> tuple[Tensor, Tensor]:
    """The encoder's output, and the logits."""
    seen: list[Tensor] = []
    handle = method.decoders[kind].module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    try:
        logits = method.server_loop.forward(kind, state, x)
    finally:
        handle.remove()
    return seen[-1], logits


def _method(federation: Federation, who: str) -> DataFree[Any]:
    """The method with the generator."""
    method = federation.algorithm
    if not isinstance(method, DataFree):
        raise ConfigError(
            f"{who} needs a method with a generator, FedGen or HFedCKD; algorithm is {type(method).__name__}"
        )
    return method
