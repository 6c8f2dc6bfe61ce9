"""HFedCKD.

"HFedCKD: Toward Robust Heterogeneous Federated Learning via Data-free Knowledge Distillation and Two-way Contrast",
2025, arXiv:2503.06511.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch.cli import OptimizerCallable
from torch import Tensor

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.errors import ConfigError
from lit_fed.losses import disagreement, diversity, ensemble_cross_entropy, gated_cross_entropy, model_contrast
from lit_fed.methods.data_free import weighting
from lit_fed.methods.data_free.base import DataFree, counts_of
from lit_fed.methods.regularizers import declared
from lit_fed.methods.server import positive
from lit_fed.networks.generators import Generator, ImageGenerator, LatentGenerator

PREVIOUS = "previous."  # in a client's state: its network after its last round
FIRST = "first"  # in a client's payload: whether the client has no history
SAMPLES, TARGETS, GATES = "pseudo/samples", "pseudo/targets", "pseudo/gates"  # in the broadcast


def _adam_of_dcgan(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3, betas=(0.5, 0.999))


class HFedCKD(DataFree[list[fed.ClientUpdate]]):
    r"""Distils clients with networks of several kinds by pseudo-samples, and regularises training by two contrasts.

    A round of the server, with the cohort S and clients' networks :math:`f_i`:

    1. weights :math:`w_i \propto \max(\pi_i, 1/T)^{-a} (1 + b\,\delta_i)`, with :math:`\pi_i` the probability of taking
       part and :math:`\delta_i` the divergence of i's predictions on pseudo-samples from the cohort's
       (`lit_fed.methods.data_free.weighting.inverse_probability_weights`);
    2. each kind's global network becomes the w-weighted mean of the tensors of equal name and shape;
    3. the generator G learns, with labels :math:`y \sim \hat p(y) \propto \sum_i w_i c_{iy}` and
       :math:`\omega_{iy} \propto w_i c_{iy}`, from :math:`\sum_i \omega_{iy}\,\mathrm{CE}(f_i(G), y)`, η times
       `lit_fed.losses.diversity` and, with images, `lit_fed.losses.disagreement` with the global network;
    4. each global network learns from :math:`g(u)\,\mathrm{CE}(p, f(G))`, with
       :math:`p = \sum_i \omega_{iy} \sigma(f_i)` and the gate :math:`g(u) = 1/(1 + \exp(-\lambda(u - \theta)))` of
       the confidence :math:`u = \max p`.

    A client minimises :math:`\ell + \kappa\,g(u)\,\mathrm{CE}(p, f)` on pseudo-samples that it received, and the two
    terms of `contrasts`; these need its previous network and are left out in its first round. Logs
    ``server/ipwd_effective_size``, ``server/ipwd_entropy``,
    ``server/ipwd_largest``, ``server/divergence``, ``server/first_participations``, ``server/history_bytes`` (mean size
    of a client's history), ``server/clients_seen`` (number of clients that have taken part), ``server/gate``,
    ``server/generator_…``, ``server/label_entropy``, ``server/distillation``.

    Args:
        generator: Output of the generator: ``images``, for whole networks, or ``features``, for classifiers alone,
            which is cheaper and works with any data.
        ipwd: Use step 1 and the gate; if false, clients weigh by `weighting` alone and all samples weigh 1.
        inclusion: :math:`\pi_i` as the participation knows it (``probability``), or the share of past rounds in which
            the client's update arrived (``frequency``).
        exponent: a.
        divergence_weight: b.
        gate_slope: λ.
        gate_threshold: θ, a probability.
        contrast: Use the two contrasts.
        encoder_weight: Weight of the encoders' contrast.
        decoder_weight: Weight of the classifiers' contrast.
        temperature: τ of both contrasts.
        distillation_weight: κ.
        pseudo_size: Pseudo-samples that clients receive; the largest number that a client uses for a batch.
        distillation_steps: Steps of the global network in a round, each on `generator_batch_size` pseudo-samples.
        distillation_optimizer: The optimizer of these steps, fresh each round.
        disagreement_weight: Weight of the generator's last term.
        noise_size: Length of the generator's noise.
        width: Width of the generator: channels for images, units of the hidden layer for features.
        generator_steps: Steps of the generator in a round; 0 also turns distillation off.
        generator_batch_size: Samples in such a step.
        generator_optimizer: The generator's optimizer, fresh each round; null for Adam with DCGAN's betas, (.5, .999),
            at .001.
        diversity: η.
        label_prior: :math:`\hat p`, one weight a class; null for the label counts.
        weighting: A further factor of a client's weight: ``uniform``, or its ``samples``.
        kwargs: ``collapse_below`` and ``explosion_above`` of `lit_fed.methods.data_free.base.DataFree`,
            and the settings of every method: `lit_fed.algorithm.Algorithm`.

    Raises:
        ConfigError: For a setting out of range, see `lit_fed.methods.data_free.base.DataFree`; for ``images`` of data
            that are not images.

    Note:
        The paper's Equation 8, coefficients and generators are not available to us. Ours are: the form of step 1, with
        its derivation from Horvitz and Thompson's estimator; that the gate sees the ensemble's confidence; MOON's form
        of the contrasts, with which networks are near and far; the image generator, like DENSE's without its term on
        batch-norm statistics; that everything travels, so that a client's own network is its history. T is the rounds
        so far. With ``ipwd: false``, ``contrast: false`` and ``generator_steps: 0`` it is FedAvg.
    """

    def __init__(
        self,
        generator: Literal["images", "features"] = "images",
        ipwd: bool = True,
        inclusion: Literal["probability", "frequency"] = "probability",
        exponent: float = 1.0,
        divergence_weight: float = 1.0,
        gate_slope: float = 10.0,
        gate_threshold: float = 0.5,
        contrast: bool = True,
        encoder_weight: float = 0.1,
        decoder_weight: float = 0.1,
        temperature: float = 0.5,
        distillation_weight: float = 1.0,
        pseudo_size: int = 128,
        distillation_steps: int = 20,
        distillation_optimizer: OptimizerCallable = lambda p: torch.optim.SGD(p, lr=0.01),
        disagreement_weight: float = 0.1,
        noise_size: int = 64,
        width: int = 32,
        generator_steps: int = 30,
        generator_batch_size: int = 64,
        generator_optimizer: OptimizerCallable | None = None,
        diversity: float = 1.0,
        label_prior: list[float] | None = None,
        weighting: Literal["samples", "uniform"] = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            noise_size, generator_steps, generator_batch_size, generator_optimizer or _adam_of_dcgan, diversity,
            label_prior, weighting, **kwargs,
        )  # fmt: skip
        self.generator = generator
        self.inclusion = inclusion
        for name, value, least in (
            ("exponent", exponent, 0), ("divergence_weight", divergence_weight, 0), ("gate_slope", gate_slope, 0),
            ("encoder_weight", encoder_weight, 0), ("decoder_weight", decoder_weight, 0),
            ("distillation_weight", distillation_weight, 0), ("pseudo_size", pseudo_size, 2),
            ("distillation_steps", distillation_steps, 0), ("disagreement_weight", disagreement_weight, 0),
        ):  # fmt: skip
            check_range(f"algorithm.{name}", value, least=least)
        self.gate_threshold = check_range("algorithm.gate_threshold", gate_threshold, least=0, most=1)
        self.ipwd = ipwd
        self.exponent = exponent
        self.divergence_weight = divergence_weight
        self.gate_slope = gate_slope
        self.contrast = contrast
        self.encoder_weight = encoder_weight
        self.decoder_weight = decoder_weight
        self.temperature = positive("temperature", temperature)
        self.distillation_weight = distillation_weight
        self.pseudo_size = pseudo_size
        self.distillation_steps = distillation_steps
        self.distillation_optimizer = distillation_optimizer
        self.disagreement_weight = disagreement_weight
        self.width = width
        self.needs = frozenset({"loss", "head", "targets", "classes", "one_model"})
        self.needs |= {"logits", "features"} if contrast else set()
        self.needs |= {"forward"} if generator == "images" else set()
        self.needs |= {"one_client"} if generator_steps and distillation_weight else set()  # samples are drawn
        self.needs |= {"probability"} if ipwd and inclusion == "probability" else set()

    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        """Start without pseudo-samples and without past participants."""
        server = super().setup(models, population)
        participations = torch.zeros(population.num_clients, dtype=torch.int64)
        return {**server, "pseudo": {}, "participations": participations}

    def make_generator(self) -> Generator:
        """A generator of images or features.

        Raises:
            ConfigError: For images, if the data are not images.
        """
        if self.generator == "features":
            features = next(iter(self.decoders.values())).num_features
            return LatentGenerator(features, self.num_classes, self.noise_size, self.width)
        shape = self.population.data.input_shape
        if shape is None or len(shape) != 3:
            raise ConfigError(
                f"algorithm.generator makes images, and a sample of the data has shape {shape}; set it to features"
            )
        return ImageGenerator(shape, self.num_classes, self.noise_size, self.width)

    # ------------------------------------------------------------------ client

    def objective(self, client: fed.Client, batch: Any) -> fed.Terms:
        """The task's loss, the loss on pseudo-samples, and the two contrasts."""
        terms = super().objective(client, batch)
        if client.stage != "train" or client.run(batch).loss is None:
            return terms
        if SAMPLES in client.received and self.distillation_weight:
            count = min(len(client.targets(batch)), self.pseudo_size)
            chosen = torch.randint(self.pseudo_size, (count,), device=client.device)
            samples, targets, gates = (client.received[name][chosen] for name in (SAMPLES, TARGETS, GATES))
            if self.generator == "images":
                logits = client.forward(samples)
            else:
                logits = self.decoder_of(client).logits(client.parameters, samples)
            terms["distillation"] = self.distillation_weight * gated_cross_entropy(logits, targets, gates)
        return {**terms, **(self.contrasts(client, batch) if self.contrast else {})}

    def contrasts(self, client: fed.Client, batch: Any) -> fed.Terms:
        """Two terms of MOON's form with their weights, see `lit_fed.losses.model_contrast`.

        - ``encoder``: the features z of a batch are drawn to the global network's, away from the client's previous
          one's;
        - ``decoder``: its outputs f are drawn to the previous network's, away from the global one's.

        Both networks see the batch in evaluation mode. Each term is ln 2 if all three networks agree. Empty if the
        client has no history or received nothing.
        """
        previous = fed.split_prefix(PREVIOUS, client.state)[0]
        if not previous or not client.begun:
            return {}
        (z, f), (z_global, f_global) = _halves(client.run(batch)), _halves(client.teach(batch))
        z_before, f_before = _halves(client.teach(batch, previous))
        terms = {}
        if self.encoder_weight:
            terms["encoder"] = self.encoder_weight * model_contrast(z, z_global, z_before, self.temperature)
        if self.decoder_weight:
            terms["decoder"] = self.decoder_weight * model_contrast(f, f_before, f_global, self.temperature)
        return terms

    def finish(self, client: fed.Client) -> fed.Update:
        """The network and label counts; with the contrasts, also whether a history exists. Keeps the new history."""
        update = super().finish(client)
        if not self.contrast:
            return update
        first = torch.tensor(client.is_new, device=client.device)
        history = fed.add_prefix(PREVIOUS, client.model.tensors())
        return replace(update, payload={**update.payload, FIRST: first}, state=history)

    # ------------------------------------------------------------------ server

    def broadcast(self, server: fed.Server, round_idx: int, kind: str, stage: fed.Stage = "train") -> fed.Payload:
        """The kind's global network and, for training, pseudo-samples with their targets and gates."""
        sent = super().broadcast(server, round_idx, kind, stage)
        return {**sent, **server["pseudo"]} if stage == "train" and self.distillation_weight else sent

    def forecast(self, server: fed.Server, round_idx: int, kind: str) -> fed.Payload:
        """A broadcast after the generator's first training."""
        sent = self.broadcast(server, round_idx, kind)
        if not (self.generator_steps and self.distillation_weight):
            return sent
        draw = torch.zeros(2, self.noise_size), torch.zeros(2, dtype=torch.int64)
        shape = self.pseudo.make(server["generator"], *(tensor.to(self.pseudo.device) for tensor in draw)).shape[1:]
        count, classes = self.pseudo_size, self.num_classes
        return {**sent, SAMPLES: torch.empty(count, *shape), TARGETS: torch.empty(count, classes),
                GATES: torch.empty(count)}  # fmt: skip

    def reducer(self, server: fed.Server) -> fed.Reducer[list[fed.ClientUpdate]]:
        """Gather all updates: a client's weight depends on all clients."""
        return fed.Gather()

    def step(self, server: fed.Server, aggregate: list[fed.ClientUpdate], cohort: fed.Cohort) -> dict[str, float]:
        """Weigh, average, train the generator, distil."""
        server["participations"][list(set(cohort.delivered))] += 1
        counts = counts_of(aggregate)
        metrics: dict[str, float] = {}
        weights = torch.ones(len(aggregate), dtype=torch.float64, device=counts.device)
        if self.weighting == "samples":
            weights *= torch.tensor([update.weight for update in aggregate], device=counts.device)
        if self.ipwd:
            factors, metrics = self._inverse_probabilities(server, aggregate, cohort)
            weights *= factors
        mean = self.means()
        for update, weight in zip(aggregate, weights.tolist(), strict=True):
            mean.add_weighed(update, weight)
        self.take(server, mean.means())
        if self.contrast:
            metrics["server/first_participations"] = sum(int(update.payload[FIRST]) for update in aggregate)
            kept = [fed.num_bytes(self.models[update.kind].tensors()) for update in aggregate]
            metrics["server/history_bytes"] = sum(kept) / len(kept)
        metrics["server/clients_seen"] = int((server["participations"] > 0).sum())
        prior = self.prior(weighting.label_prior(weights, counts), counts)
        if self.generator_steps and prior is not None:
            server["prior"].copy_(prior)
            metrics |= self._teach_generator(server, aggregate, weighting.label_shares(weights, counts), cohort)
            metrics |= self._distil(server, aggregate, weighting.label_shares(weights, counts), cohort)
        return metrics

    def _inverse_probabilities(
        self, server: fed.Server, updates: Sequence[fed.ClientUpdate], cohort: fed.Cohort
    ) -> tuple[Tensor, dict[str, float]]:
        """The clients' weights, and metrics of their spread."""
        rounds, device = cohort.round_idx + 1, self.pseudo.device
        if self.inclusion == "probability":
            probabilities = torch.tensor([update.probability for update in updates], dtype=torch.float64)
        else:
            seen = server["participations"][[update.client_id for update in updates]]
            probabilities = seen.double() / rounds
        divergences = torch.zeros(len(updates), dtype=torch.float64, device=device)
        if server["learnt"]:
            divergences = weighting.divergences_from_mean(self._ensemble(server, updates, cohort).double().softmax(2))
        weights = weighting.inverse_probability_weights(
            probabilities.to(device), divergences, rounds, self.exponent, self.divergence_weight
        )
        share = weighting.normalised(weights)
        return weights, {
            "server/ipwd_effective_size": weighting.effective_size(share),
            "server/ipwd_entropy": weighting.entropy(share),
            "server/ipwd_largest": float(share.max()),
            "server/divergence": float(divergences.mean()),
        }

    @torch.no_grad()
    def _ensemble(self, server: fed.Server, updates: Sequence[fed.ClientUpdate], cohort: fed.Cohort) -> Tensor:
        """The clients' logits (M, B, C) on samples of the generator from the round's start."""
        seed = self.population.seed, "hfedckd", cohort.round_idx, "divergence"
        draw = next(self.pseudo.batches(server["prior"], 1, self.pseudo_size, seed))
        return self._answers(updates, self.pseudo.make(server["generator"], *draw))

    def _answers(self, updates: Sequence[fed.ClientUpdate], samples: Tensor) -> Tensor:
        return torch.stack([self._logits(update.kind, update.payload, samples) for update in updates])

    def _logits(self, kind: str, held: fed.Payload, samples: Tensor) -> Tensor:
        """A network's logits for pseudo-samples, in evaluation mode."""
        if self.generator == "features":
            return self.head_logits(kind, held, samples)
        return self.server_loop.forward(kind, {n: t for n, t in held.items() if n in self.models[kind]}, samples)

    def _teach_generator(
        self, server: fed.Server, updates: Sequence[fed.ClientUpdate], shares: Tensor, cohort: fed.Cohort
    ) -> dict[str, float]:
        student = self.population.kinds.names[0]

        def terms(batch: tuple[Tensor, Tensor]) -> fed.Terms:
            noise, labels = batch
            made = self.pseudo.network(noise, labels)
            logits = self._answers(updates, made)
            share = shares[:, labels].to(logits.dtype)
            of_generator = {
                "cross_entropy": ensemble_cross_entropy(logits, labels, share),
                "diversity": self.diversity * diversity(noise, made),
            }
            if self.disagreement_weight and self.generator == "images":
                mixed = weighting.mixture(logits, share).clamp_min(torch.finfo(logits.dtype).tiny).log()
                of_student = self._logits(student, server["models"][student], made)
                of_generator["disagreement"] = self.disagreement_weight * disagreement(mixed, of_student)
            return of_generator

        seed = self.population.seed, "hfedckd", cohort.round_idx
        draws = self.pseudo.batches(
            server["prior"], self.generator_steps, self.generator_batch_size, (*seed, "generator")
        )
        server["generator"], losses = self.server_loop.learn(
            self.pseudo.network, server["generator"], draws, terms, seed=seed, optimizer=self.generator_optimizer
        )
        server["learnt"] = True
        return self.report(server, losses, cohort.round_idx)

    @torch.no_grad()
    def _lesson(
        self, server: fed.Server, updates: Sequence[fed.ClientUpdate], shares: Tensor, draw: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Pseudo-samples (B, …), the ensemble's probabilities (B, C), gates (B,)."""
        samples = self.pseudo.make(server["generator"], *draw)
        logits = self._answers(updates, samples)
        targets = weighting.mixture(logits, shares[:, draw[1]].to(logits.dtype))
        confidence = targets.amax(1)
        gates = confidence.new_ones(())
        if self.ipwd:
            gates = weighting.sample_gate(confidence, self.gate_slope, self.gate_threshold)
        return samples, targets, gates.expand_as(confidence)

    def _distil(
        self, server: fed.Server, updates: Sequence[fed.ClientUpdate], shares: Tensor, cohort: fed.Cohort
    ) -> dict[str, float]:
        seed = self.population.seed, "hfedckd", cohort.round_idx
        sent = next(self.pseudo.batches(server["prior"], 1, self.pseudo_size, (*seed, "sent")))
        samples, targets, gates = self._lesson(server, updates, shares, sent)
        server["pseudo"] = {SAMPLES: samples, TARGETS: targets, GATES: gates.contiguous()}
        metrics = {"server/gate": float(gates.mean())}
        if not self.distillation_steps:
            return metrics
        draws = self.pseudo.batches(
            server["prior"], self.distillation_steps, self.generator_batch_size, (*seed, "distillation")
        )
        lessons = [self._lesson(server, updates, shares, draw) for draw in draws]
        losses = [self._distil_into(server, kind, lessons, (*seed, kind)) for kind in self.models]
        return {**metrics, "server/distillation": sum(losses) / len(losses)}

    def _distil_into(
        self, server: fed.Server, kind: str, lessons: Sequence[tuple[Tensor, Tensor, Tensor]], seed: tuple[Any, ...]
    ) -> float:
        """Train a kind's global network, or its classifier alone, and return the mean loss."""

        def loss(task: fed.Objective, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
            samples, targets, gates = batch
            module = task if self.generator == "images" else self.decoders[kind].module
            return gated_cross_entropy(module(samples), targets, gates)

        begin: fed.Tensors = server["models"][kind]
        if self.generator == "features":
            begin = self.decoders[kind].tensors(begin)
        learnt, mean = self.server_loop.train(
            kind, begin, lessons, loss, epochs=1, seed=seed, optimizer=self.distillation_optimizer
        )
        for name in self.models[kind].shared_names("up"):
            if name in learnt:
                server["models"][kind][name].copy_(learnt[name])
        return mean


def _halves(outputs: fed.Outputs) -> tuple[Tensor, Tensor]:
    """The encoder's output (B, d) and the classifier's (B, C)."""
    return declared(outputs.features), declared(outputs.logits)
