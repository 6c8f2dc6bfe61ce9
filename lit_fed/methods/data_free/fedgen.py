"""FedGen.

Zhu, Hong, Zhou: "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.losses import diversity, ensemble_cross_entropy, knowledge_distillation
from lit_fed.methods.data_free.averaging import SlotMean
from lit_fed.methods.data_free.base import COUNTS, DataFree, counts_of
from lit_fed.methods.data_free.weighting import label_prior, label_shares
from lit_fed.methods.regularizers import logits
from lit_fed.networks.generators import Generator, LatentGenerator

GENERATOR = "generator/"  # in the broadcast: the generator's weights
PRIOR = "labels/prior"  # in the broadcast: the distribution of labels (C,)


class Arrived(NamedTuple):
    """A cohort's aggregate.

    Args:
        means: The mean networks by kind.
        answers: Each client's classifier and label counts.
    """

    means: Mapping[str, fed.Payload]
    answers: Sequence[fed.ClientUpdate]


class FedGen(DataFree[Arrived]):
    r"""The server learns a generator of features that the clients' classifiers agree on; clients learn from it too.

    Clients send their networks and their label counts :math:`c_{iy}`. The server averages, then moves the generator G,
    of noise ε uniform from 0 to 1 and labels :math:`y \sim \hat p(y)`, along

    .. math:: \sum_i \omega_{iy}\,\mathrm{CE}(h_i(G(\varepsilon, y)), y) + \eta\,\mathrm{diversity}

    with :math:`h_i` a client's classifier, :math:`\omega_{iy} = c_{iy} / \sum_j c_{jy}` and
    `lit_fed.losses.diversity`. In the next round t a client minimises, with its own classifier h,

    .. math:: \ell + \alpha_t\,\mathrm{CE}(h(G(\varepsilon, y')), y')
              + \beta_t\,\mathrm{KL}(\sigma(h(G(\varepsilon, y)))\,\|\,\sigma(f(x)))

    with y the batch's labels, y' drawn from :math:`\hat p` and :math:`\alpha_t = \alpha\,\gamma^t`, likewise β.
    Networks may be of several kinds with one length of features. Logs ``server/generator_cross_entropy``,
    ``server/generator_diversity`` (with its weight), ``server/generator_variance`` (the smallest of any class, see
    `lit_fed.methods.data_free.base`) and ``server/label_entropy``.

    Args:
        alpha: α.
        beta: β; α = β = 0 is FedAvg, and only the networks are sent down.
        decay: γ.
        noise_size: Length of ε.
        hidden: Units of the generator's hidden layer.
        generator_steps: Steps of the generator in a round.
        generator_batch_size: Samples in such a step.
        generator_optimizer: The generator's optimizer, fresh each round.
        diversity: η.
        label_prior: :math:`\hat p`, one weight a class; null for the label counts of the round's clients.
        weighting: Weights of the mean networks: ``samples`` or ``uniform``.
        kwargs: ``collapse_below`` and ``explosion_above`` of `lit_fed.methods.data_free.base.DataFree`,
            and the settings of every method: `lit_fed.algorithm.Algorithm`.

    Raises:
        ConfigError: For a setting out of range, see `lit_fed.methods.data_free.base.DataFree`.

    Note:
        Published are :math:`\alpha = 10` with :math:`\beta = 10` (MNIST) or 1 (EMNIST), decayed by .98 a round, beside
        SGD with a learning rate of .01 and 20 local steps. Both terms lengthen a client's step, β's through the whole
        network, so that a rate ten times as large asks for weights a tenth as large: at .1, the rate of our other
        configurations, α = β = 10 stay at chance on the digits (three widths, 20 rounds), and at .01 they learn best.
        Our defaults are 1. The diversity has no largest value, so features grow for as long as the generator's
        optimizer lets them: with the published one, Adam at .0003 with weight decay .01 and η = 1, they stay; at .001
        without decay they grew until training diverged. With either, samples of one class become alike.

        Before the generator's first training, clients minimise ℓ alone. The KL's target has no gradient. Classes that
        no client of the round has are not drawn. The generator keeps its weights between rounds and learns from the
        current round's classifiers, with a fresh optimizer. A classifier with batch norm or dropout is in
        evaluation mode on the server.
    """

    needs = frozenset({"loss", "logits", "head", "targets", "classes", "one_model"})

    def __init__(
        self,
        alpha: float = 1.0,
        beta: float = 1.0,
        decay: float = 0.98,
        noise_size: int = 32,
        hidden: int = 128,
        generator_steps: int = 100,
        generator_batch_size: int = 64,
        generator_optimizer: OptimizerCallable = lambda p: torch.optim.Adam(p, lr=3e-4, weight_decay=0.01),
        diversity: float = 1.0,
        label_prior: list[float] | None = None,
        weighting: Literal["samples", "uniform"] = "samples",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            noise_size, generator_steps, generator_batch_size, generator_optimizer, diversity, label_prior, weighting,
            **kwargs,
        )  # fmt: skip
        self.alpha = check_range("algorithm.alpha", alpha, least=0)
        self.beta = check_range("algorithm.beta", beta, least=0)
        self.decay = check_range("algorithm.decay", decay, least=0)
        self.hidden = hidden
        if generator_steps and (alpha or beta):  # noise is drawn in every step
            self.needs |= {"one_client"}

    def make_generator(self) -> Generator:
        """A generator of features."""
        features = next(iter(self.decoders.values())).num_features
        return LatentGenerator(features, self.num_classes, self.noise_size, self.hidden)

    # ------------------------------------------------------------------ client

    def objective(self, client: fed.Client, batch: Any) -> fed.Terms:
        """The task's loss and, if a generator was received, its two terms."""
        terms = super().objective(client, batch)
        generator, rest = fed.split_prefix(GENERATOR, client.received)
        if not generator or client.stage != "train" or client.run(batch).loss is None:
            return terms
        weight = self.decay**client.round_idx
        decoder, labels = self.decoder_of(client), client.targets(batch)
        if self.alpha:
            drawn = torch.multinomial(rest[PRIOR], len(labels), replacement=True)
            made = self.pseudo.make(generator, self.pseudo.noise_like(drawn, generator), drawn)
            seen = decoder.logits(client.parameters, made)
            terms["pseudo"] = self.alpha * weight * F.cross_entropy(seen, drawn)
        if self.beta:
            made = self.pseudo.make(generator, self.pseudo.noise_like(labels, generator), labels)
            target = decoder.logits(client.parameters, made)
            terms["latent"] = self.beta * weight * knowledge_distillation(logits(client, batch), target)
        return terms

    # ------------------------------------------------------------------ server

    def broadcast(self, server: fed.Server, round_idx: int, kind: str, stage: fed.Stage = "train") -> fed.Payload:
        """The kind's global model and, for training, the generator and the distribution of labels."""
        sent = super().broadcast(server, round_idx, kind, stage)
        if stage != "train" or not server["learnt"]:
            return sent
        return {**sent, **self._lesson(server)}

    def forecast(self, server: fed.Server, round_idx: int, kind: str) -> fed.Payload:
        """A broadcast after the generator's first training."""
        return {**self.broadcast(server, round_idx, kind), **self._lesson(server)}

    def _lesson(self, server: fed.Server) -> fed.Payload:
        if not (self.generator_steps and (self.alpha or self.beta)):
            return {}
        return {**fed.add_prefix(GENERATOR, server["generator"]), PRIOR: server["prior"].float()}

    def reducer(self, server: fed.Server) -> fed.Reducer[Arrived]:
        """The mean of the networks, and each client's classifier and label counts."""
        return _Arrivals(self.means(), {kind: decoder.names for kind, decoder in self.decoders.items()})

    def step(self, server: fed.Server, aggregate: Arrived, cohort: fed.Cohort) -> dict[str, float]:
        """Average the networks, then train the generator."""
        self.take(server, aggregate.means)
        counts = counts_of(aggregate.answers)
        alike = torch.ones(len(counts), device=counts.device)
        prior = self.prior(label_prior(alike, counts), counts)
        if not self.generator_steps or prior is None:
            return {}
        server["prior"].copy_(prior)
        shares = label_shares(alike, counts)

        def terms(batch: tuple[Tensor, Tensor]) -> fed.Terms:
            noise, labels = batch
            made = self.pseudo.network(noise, labels)
            logits = torch.stack([self.head_logits(answer.kind, answer.payload, made) for answer in aggregate.answers])
            return {
                "cross_entropy": ensemble_cross_entropy(logits, labels, shares[:, labels].to(logits.dtype)),
                "diversity": self.diversity * diversity(noise, made),
            }

        seed = self.population.seed, "fedgen", cohort.round_idx
        draws = self.pseudo.batches(prior, self.generator_steps, self.generator_batch_size, (*seed, "draws"))
        server["generator"], losses = self.server_loop.learn(
            self.pseudo.network, server["generator"], draws, terms, seed=seed, optimizer=self.generator_optimizer
        )
        server["learnt"] = True
        return self.report(server, losses, cohort.round_idx)


class _Arrivals(fed.Reducer[Arrived]):
    """The reducer of the mean networks, and of each client's classifier and label counts."""

    def __init__(self, means: SlotMean, head_names: Mapping[str, Mapping[str, str]]) -> None:
        self._means, self._answers, self._head_names = means, fed.Gather(), head_names

    def add(self, update: fed.ClientUpdate) -> None:
        """Sum up the network; keep the classifier and the label counts."""
        self._means.add(update)
        kept = {name: tensor for name, tensor in update.payload.items() if name in self._head_names[update.kind]}
        self._answers.add(update.with_payload({**kept, COUNTS: update.payload[COUNTS]}))

    def result(self, workers: fed.Workers) -> Arrived | None:
        """The aggregate over all processes."""
        means, answers = self._means.result(workers), self._answers.result(workers)
        return None if means is None or answers is None else Arrived(means, answers)
