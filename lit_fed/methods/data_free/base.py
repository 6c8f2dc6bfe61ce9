"""The base of the data-free methods: networks of several kinds with one feature size, and a generator on the server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.func import functional_call

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.data.population.pictures import even_subset
from lit_fed.errors import ConfigError
from lit_fed.methods.data_free.averaging import Decoder, SlotMean, slots
from lit_fed.methods.data_free.display import generated_picture
from lit_fed.methods.data_free.weighting import entropy
from lit_fed.networks.generators import Generator
from lit_fed.seeding import derive_seed, torch_generator

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AggregateT = TypeVar("AggregateT")

COUNTS = "labels/counts"
"""In a client's answer: its training samples by class (C,)."""

_SHOWN = 8  # samples of a class in a picture
_MOST_WATCHED = 20  # classes whose variance is measured in a round


class DataFree(fed.Algorithm[AggregateT]):
    """Clients send their networks and label counts; a generator on the server makes samples without data.

    Every kind of network has a global model, the `lit_fed.methods.data_free.averaging.SlotMean` of its clients.
    Encoders may differ; every classifier (``algorithm.head``) reads features of one size.

    Args:
        noise_size: Length of the generator's noise.
        generator_steps: Steps of the generator in a round; 0 for no generator.
        generator_batch_size: Samples in a step, at least 2.
        generator_optimizer: The generator's optimizer, fresh each round.
        diversity: Weight of `lit_fed.losses.diversity`.
        label_prior: The generator's distribution of labels, one weight a class; null for the label counts of the
            round's clients.
        weighting: Weights of the mean networks: ``samples`` or ``uniform``.
        collapse_below: Warn, once, where `lit_fed.methods.data_free.base.class_variances` has less for some class.
        explosion_above: Warn, once, where the generator's mean cross-entropy of a round is more, in nats.
        kwargs: The settings of every method: `lit_fed.algorithm.Algorithm`.
    """

    nonnegative = frozenset({COUNTS})

    def __init__(
        self,
        noise_size: int,
        generator_steps: int,
        generator_batch_size: int,
        generator_optimizer: OptimizerCallable,
        diversity: float,
        label_prior: list[float] | None,
        weighting: Literal["samples", "uniform"],
        collapse_below: float = 1e-5,
        explosion_above: float = 100.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.generator_steps = check_range("algorithm.generator_steps", generator_steps, least=0)
        # a generator has batch norm
        self.generator_batch_size = check_range("algorithm.generator_batch_size", generator_batch_size, least=2)
        self.diversity = check_range("algorithm.diversity", diversity, least=0)
        self.collapse_below = check_range("algorithm.collapse_below", collapse_below, least=0)
        self.explosion_above = check_range("algorithm.explosion_above", explosion_above, least=0)
        self.weighting = weighting
        if label_prior is not None and (min(label_prior, default=-1) < 0 or sum(label_prior) <= 0):
            raise ConfigError(
                f"algorithm.label_prior is {label_prior}; it must be a weight of at least 0 for each class"
            )
        self.noise_size = noise_size
        self.generator_optimizer = generator_optimizer
        self.label_prior = label_prior

    # ------------------------------------------------------------------ the whole

    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        """Start with each kind's weights as its global model, and build the generator."""
        self.population, self.models, self.num_classes = population, models, population.num_classes
        name = type(self).__name__
        self.decoders = {kind: Decoder(kind, model, self.head, name) for kind, model in models.items()}
        self._check_decoders()
        self._check_label_prior()
        self.slots = slots(models, self.decoders)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(derive_seed(population.seed, name, "generator"))
            network = self.make_generator()
        device = next(iter(next(iter(models.values())).parameters.values())).device
        self.pseudo = PseudoSamples(network.to(device))
        return {
            "models": {kind: model.copy() for kind, model in models.items()},
            "generator": {key: tensor.clone() for key, tensor in network.state_dict().items()},
            "prior": torch.full((self.num_classes,), 1 / self.num_classes, dtype=torch.float64),
            "learnt": False,
            WARNED: [],
        }

    def make_generator(self) -> Generator:
        """The generator, with weights from torch's global random numbers."""
        raise NotImplementedError

    def _check_decoders(self) -> None:
        first = next(iter(self.decoders.values()))
        for kind, decoder in self.decoders.items():
            if decoder.num_features != first.num_features:
                raise ConfigError(
                    f"algorithm {type(self).__name__} joins networks by their features, and trainer.kinds "
                    f"{first.kind!r} and {kind!r} have {first.num_features} and {decoder.num_features} features; give "
                    "them one length (small_cnn: num_features; mlp: the last of hidden)"
                )
            model = self.models[kind]
            with torch.no_grad(), model.evaluating():
                like = next(iter(model.parameters.values()))
                logits = decoder.logits({}, like.new_zeros(2, decoder.num_features))
            if logits.ndim != 2 or logits.shape[1] != self.num_classes:
                raise ConfigError(
                    f"algorithm {type(self).__name__} needs logits (B, {self.num_classes}) for the data's "
                    f"{self.num_classes} classes, and the head of model {fed.task_name(model.task)} gives "
                    f"{tuple(logits.shape)}; name another submodule as algorithm.head"
                )

    def _check_label_prior(self) -> None:
        if self.label_prior is None:
            return
        if len(self.label_prior) != self.num_classes:
            raise ConfigError(
                f"algorithm.label_prior has {len(self.label_prior)} weights, and the data have {self.num_classes} "
                "classes; give one for each"
            )
        if not self.population.data.census.is_complete:
            return  # a node has some of the clients; the server checks
        have = self.population.data.census.class_histogram().sum(0)
        absent = [label for label, weight in enumerate(self.label_prior) if weight and not have[label]]
        if absent:
            raise ConfigError(
                f"algorithm.label_prior is {self.label_prior[absent[0]]} for class {absent[0]}, and no client has "
                "a training sample; set it to 0, or leave label_prior null"
            )

    # ------------------------------------------------------------------ client

    def finish(self, client: fed.Client) -> fed.Update:
        """The network and the label counts (C,)."""
        counts = torch.from_numpy(client.population.census.class_counts(client.id)).to(client.device)
        return fed.Update({**super().finish(client).payload, COUNTS: counts})

    def decoder_of(self, client: fed.Client) -> Decoder:
        """The classifier of the client's kind of network."""
        task = client.model.task
        return next(self.decoders[kind] for kind, model in self.models.items() if model.task is task)

    # ------------------------------------------------------------------ server

    def broadcast(self, server: fed.Server, round_idx: int, kind: str, stage: fed.Stage = "train") -> fed.Payload:
        """The kind's global model."""
        return {name: server["models"][kind][name] for name in self.models[kind].shared_names("down")}

    def means(self) -> SlotMean:
        """A new mean of the clients' networks."""
        return SlotMean(self.slots, uniform=self.weighting == "uniform")

    def take(self, server: fed.Server, means: Mapping[str, fed.Payload]) -> None:
        """Move the global models to the means."""
        for kind, mean in means.items():
            for name, tensor in mean.items():
                server["models"][kind][name].copy_(tensor)

    def prior(self, counted: Tensor, counts: Tensor) -> Tensor | None:
        """The labels' distribution (C,) for a round: `label_prior` if it is set, over the round's classes.

        Args:
            counted: The distribution by counts (C,).
            counts: Samples by client and class (M, C).

        Returns:
            None if the round has no class with a positive weight.
        """
        if self.label_prior is None:
            return counted
        asked = torch.tensor(self.label_prior, dtype=torch.float64, device=counted.device) * (counts.sum(0) > 0)
        return asked / asked.sum() if asked.sum() > 0 else None

    def report(self, server: fed.Server, losses: Mapping[str, float], round_idx: int) -> dict[str, float]:
        """The generator's metrics of a round; warn if it collapsed or its loss exploded.

        Args:
            server: The server's state, with the round's generator.
            losses: The mean of each term over the round, including ``cross_entropy``.
            round_idx: The round, counted from 0.
        """
        warn_of_explosion(server, round_idx, losses["cross_entropy"], self.explosion_above)
        there = torch.nonzero(server["prior"]).flatten().tolist()
        classes = [there[at] for at in even_subset(len(there), _MOST_WATCHED)]
        variances = class_variances(self.samples_of(server, classes))
        warn_of_collapse(server, round_idx, classes, variances, self.collapse_below)
        return {
            **{f"server/generator_{name}": value for name, value in losses.items()},
            "server/generator_variance": float(variances.min()),
            "server/label_entropy": entropy(server["prior"]),
        }

    @torch.no_grad()
    def samples_of(self, server: fed.Server, classes: Sequence[int], count: int = _SHOWN) -> Tensor:
        """Pseudo-samples of each class, (classes, count, …), always from the same noise."""
        labels = torch.tensor(classes, device=self.pseudo.device).repeat_interleave(count)
        noise, _ = next(self.pseudo.batches(server["prior"], 1, len(labels), (self.population.seed, "figures")))
        made = self.pseudo.make(server["generator"], noise, labels)
        return made.view(len(classes), count, *made.shape[1:])

    @property
    def server_loop(self) -> fed.ServerLoop:
        """The training loop of the server."""
        assert self.population.server_loop is not None, "it is only in forecasts that nothing is run"
        loop: fed.ServerLoop = self.population.server_loop
        return loop

    def figures(self, server: fed.Server) -> dict[str, Figure]:
        """Pseudo-samples of each class, always from the same noise: images, or the mean features."""
        if not server["learnt"]:
            return {}
        made = self.samples_of(server, range(self.num_classes)).float().cpu()
        return {"generated": generated_picture(made.numpy())}

    def head_logits(self, kind: str, held: fed.Payload, features: Tensor) -> Tensor:
        """The logits of a kind's classifier with given tensors, in evaluation mode."""
        with self.models[kind].evaluating():
            return self.decoders[kind].logits(held, features)


def counts_of(updates: Sequence[fed.ClientUpdate]) -> Tensor:
    """Samples by client and class (M, C)."""
    return torch.stack([update.payload[COUNTS] for update in updates])


# ---------------------------------------------------------------------- the generator


Draw = tuple[Tensor, Tensor]
"""Noise (B, n), uniform from 0 to 1, and labels (B,)."""


class PseudoSamples:
    """Makes samples with a generator and given weights.

    Args:
        network: The generator, on its device; its own weights are ignored.
    """

    def __init__(self, network: Generator) -> None:
        self.network = network

    @property
    def device(self) -> torch.device:
        """The generator's device."""
        return next(self.network.parameters()).device

    def batches(self, prior: Tensor, count: int, size: int, seed: tuple[Any, ...]) -> Iterator[Draw]:
        """Batches of noise and labels, drawn on the CPU: the same on every device and process.

        Args:
            prior: Weights of the classes (C,).
            count: Number of batches.
            size: Samples in a batch.
            seed: Seed and purpose of the random numbers.
        """
        random, weights = torch_generator(*seed), prior.double().cpu()
        for _ in range(count):
            noise = torch.rand(size, self.network.noise_size, generator=random)
            labels = torch.multinomial(weights, size, replacement=True, generator=random)
            yield noise.to(self.device), labels.to(self.device)

    def noise_like(self, labels: Tensor, tensors: fed.Payload) -> Tensor:
        """Noise for labels, from the device's generator, in the weights' dtype."""
        dtype = next(iter(tensors.values())).dtype
        return torch.rand(len(labels), self.network.noise_size, device=labels.device, dtype=dtype)

    def make(self, tensors: fed.Payload, noise: Tensor, labels: Tensor) -> Tensor:
        """Samples (B, …), in evaluation mode; differentiable in noise and weights.

        Args:
            tensors: The generator's weights.
            noise: (B, n).
            labels: (B,).
        """
        if self.network.training:
            self.network.eval()
        made: Tensor = functional_call(self.network, dict(tensors), (noise, labels))
        return made


# ---------------------------------------------------------------------- warnings


WARNED = "warned"
"""Key of the server's state: names of the given warnings, so that a run, resumed or not, gives each warning once."""


class GeneratorCollapse(UserWarning):
    """A generator makes nearly the same sample of a class from any noise."""


class GeneratorExplosion(UserWarning):
    """A generator's loss is far above what guessing costs."""


def class_variances(samples: Tensor) -> Tensor:
    r"""The variance within each class, relative to the mean square of all values.

    .. math:: v_y = \frac{E_d\,\mathrm{Var}_{x \mid y}(x_d)}{E_{x, d}\,x_d^2}

    Args:
        samples: By class and number, (C, n, …), n at least 2.

    Returns:
        (C,): 0 if all samples of a class are equal; (n − 1)/n for independent values with mean 0.
    """
    flat = samples.flatten(2).double()
    within = flat.var(dim=1, correction=0).mean(1)
    return within / flat.square().mean().clamp_min(torch.finfo(flat.dtype).tiny)


def warn_of_collapse(
    server: fed.Server, round_idx: int, classes: Sequence[int], variances: Tensor, below: float
) -> None:
    """Warn, once per run, if the samples of a class hardly differ.

    Args:
        server: The server's state.
        round_idx: The round, counted from 0.
        classes: The classes of the variances.
        variances: `class_variances` (C,).
        below: Threshold of the warning.
    """
    least = int(variances.argmin())
    if not float(variances[least]) >= below:
        _once(
            server,
            GeneratorCollapse,
            f"round {round_idx}: the generator's samples of class {classes[least]} hardly differ, their relative "
            f"variance is {float(variances[least]):.2g} (algorithm.collapse_below is {below:g}); raise "
            "algorithm.diversity",
        )


def warn_of_explosion(server: fed.Server, round_idx: int, cross_entropy: float, above: float) -> None:
    """Warn, once per run, if the clients' classifiers reject the samples' classes with near certainty.

    Args:
        server: The server's state.
        round_idx: The round, counted from 0.
        cross_entropy: The generator's mean cross-entropy of the round, in nats.
        above: Threshold of the warning.
    """
    if not cross_entropy <= above:
        _once(
            server,
            GeneratorExplosion,
            f"round {round_idx}: the generator's cross-entropy is {cross_entropy:.4g} "
            f"(algorithm.explosion_above is {above:g}), so the clients' training diverges; lower the learning rate or "
            "the weights of the pseudo-samples' losses",
        )


def _once(server: fed.Server, kind: type[UserWarning], text: str) -> None:
    if kind.__name__ not in server[WARNED]:
        server[WARNED].append(kind.__name__)
        rank_zero_warn(f"{kind.__name__}: {text}", category=kind)
