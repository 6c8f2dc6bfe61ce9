"""FedPAC.

Xu, Tong, Huang: "Personalized Federated Learning with Feature Alignment and Classifier Collaboration", ICLR 2023,
Algorithm 1. Compared with the authors' code, ``JianXu95/FedPAC``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls
from typing_extensions import override

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.losses import feature_distillation
from lit_fed.methods.fedavg import FedAvg
from lit_fed.methods.fedproto import COUNTS, KNOWN, PROTOTYPES
from lit_fed.methods.frozen_heads.frozen import linear_head
from lit_fed.methods.regularizers import features, taught_features

MEANS, VARIANCE, SUMS = "means", "variance", "sums"  # in a payload: h (C, d), V, and sums of features by class (C, d)


class FedPAC(FedAvg):
    r"""Clients share a body, with features drawn to common class centres, and get each its own mixture of their heads.

    A client first trains its head for `head_epochs`, then the body, for the length of its work, on
    :math:`\ell + \lambda \cdot \mathrm{mean}_d (f(x) - c_y)^2`, with c the mean feature of class y over all clients
    after the last round. The server averages the bodies, and addresses to client i the head
    :math:`\sum_j \alpha_{ij} W_j`,

    .. math:: \alpha_i = \mathrm{arg} \min_{\alpha \ge 0,\, \sum_j \alpha_j = 1} \; \sum_j \alpha_j^2 V_j
        + \sum_k \Bigl\| h_{ik} - \sum_j \alpha_j h_{jk} \Bigr\|^2,

    from statistics of the received body on the client's data: :math:`h_{jk} = P_j(k)\, E_j[f \mid k]` and :math:`V_j =
    (E_j \|f\|^2 - \sum_k \|h_{jk}\|^2) / n_j`. A client whose update is not in a round keeps its head.

    The server keeps the heads of all clients. The global model has the weighted mean of the heads.

    Args:
        lam: λ.
        head_epochs: Passes over the client's data for the head.
        head_lr: The head's learning rate; null for the round's.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: For a setting out of its range; before training, for a head that is not linear.

    Note:
        The program is solved exactly, as nonnegative least squares. The authors' code drops weights below 10⁻³. There a
        class without a centre has the client's own one, here it has no distance; the centres are gathered in evaluation
        mode.
    """

    needs = frozenset({"loss", "features", "targets", "head", "body", "classes"})
    nonnegative = frozenset({COUNTS, VARIANCE})

    def __init__(self, lam: float = 1.0, head_epochs: int = 1, head_lr: float | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.lam = check_range("algorithm.lam", lam, least=0)
        self.head_epochs = check_range("algorithm.head_epochs", head_epochs, least=1)
        self.head_lr = check_range("algorithm.head_lr", head_lr, above=0, null="for the round's")

    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        """The initial model, and its head for every client."""
        server, task = super().setup(models, population), self.model.task
        head = fed.head_of(task, self.head)
        assert head is not None, "as the needs say"
        width = linear_head(task, head, "algorithm FedPAC takes the features of the head").in_features
        self.shape = population.num_classes, width
        held, count = server["model"], population.num_clients
        heads = {name: torch.stack([held[name]] * count) for name in fed.head_names(self.model, self.head)}
        like = next(iter(heads.values()))
        centres = {PROTOTYPES: like.new_zeros(self.shape), KNOWN: like.new_zeros(self.shape[0])}
        return {**server, "heads": heads, **centres, "begun": False}

    # ------------------------------------------------------------------ client

    def phases(self, client: fed.Client) -> list[fed.Phase | fed.Pass]:
        """Statistics of the received body, the head, the body, and the centres of the trained one."""
        if client.stage != "train":
            return super().phases(client)
        head, work = fed.head_names(client.model, self.head), client.work
        body = [name for name in client.model.split.shared if name not in head]
        classes = torch.empty(self.shape[0], device="meta")
        example = {SUMS: torch.empty(self.shape, device="meta"), COUNTS: classes, "squares": classes[:1]}
        return [
            fed.Pass("before", client.train_loader(), self._sums, gather="sum", example=example),
            fed.Phase("head", client.train_loader(), epochs=self.head_epochs, trains=head, lr=self.head_lr),
            fed.Phase("body", client.train_loader(), epochs=work.epochs, steps=work.steps, trains=body),
            fed.Pass("after", client.train_loader(), self._sums, gather="sum", example=example),
        ]

    def _sums(self, client: fed.Client, batch: Any) -> fed.Tensors:
        """Sums of features by class (C, d), samples of each class (C,), and of squared norms (1,), of a batch."""
        f, y = taught_features(client, batch, {}), client.targets(batch)
        sums = f.new_zeros(self.shape).index_add_(0, y, f)
        counts = torch.bincount(y, minlength=self.shape[0]).to(f.dtype)
        return {SUMS: sums, COUNTS: counts, "squares": f.square().sum().unsqueeze(0)}

    def objective(self, client: fed.Client, batch: Any) -> fed.Terms:
        """The task's loss, and for the body the distance of the features to the centres."""
        terms = super().objective(client, batch)
        if client.phase != "body" or KNOWN not in client.received or not self.lam:
            return terms
        f, y = features(client, batch), client.targets(batch)
        near = torch.where(client.received[KNOWN][y].bool().unsqueeze(1), client.received[PROTOTYPES][y], f.detach())
        return {**terms, PROTOTYPES: self.lam * feature_distillation(f, near)}

    def finish(self, client: fed.Client) -> fed.Update:
        """The model, h and V before training, and the sums of features by class after it."""
        before, after = client.results["before"], client.results["after"]
        count = before[COUNTS].sum().clamp(min=1)
        h = before[SUMS] / count
        variance = ((before["squares"] / count - h.square().sum()) / count).clamp(min=0)
        statistics = {MEANS: h, VARIANCE: variance, SUMS: after[SUMS], COUNTS: after[COUNTS]}
        return fed.Update({**super().finish(client).payload, **statistics})

    # ------------------------------------------------------------------ server

    def broadcast(self, server: fed.Server, round_idx: int, kind: str, stage: fed.Stage = "train") -> fed.Payload:
        """The body, and in training the centres, once there are any."""
        sent = super().broadcast(server, round_idx, kind, stage)
        body = {name: tensor for name, tensor in sent.items() if name not in server["heads"]}
        centres = {name: server[name] for name in (PROTOTYPES, KNOWN)}
        return {**body, **centres} if stage == "train" and server["begun"] else body

    def forecast(self, server: fed.Server, round_idx: int, kind: str) -> fed.Payload:
        """Centres from the second round on."""
        return self.broadcast({**server, "begun": bool(round_idx)}, round_idx, kind)

    def address(
        self, server: fed.Server, client_id: int, round_idx: int, kind: str, stage: fed.Stage = "train"
    ) -> fed.Payload:
        """The client's head."""
        return {name: stack[client_id] for name, stack in server["heads"].items()}

    def arrive(self, update: fed.ClientUpdate, begun: fed.Payload, server: fed.Server) -> fed.ClientUpdate:
        """A stale client's movement of the body, added to the present one; its head is its own."""
        return super().arrive(update, {n: t for n, t in begun.items() if n not in server["heads"]}, server)

    def reducer(self, server: fed.Server) -> fed.Reducer[Any]:
        """The mean of the models, and each client's head and statistics."""
        return BesideMean(fed.WeightedMean(self.weighting == "uniform"), server["model"], server["heads"])

    def step(self, server: fed.Server, aggregate: Any, cohort: fed.Cohort) -> dict[str, float]:
        """Replace the model by the mean, the centres of the round's classes, and the heads of its clients."""
        mean, updates = aggregate
        super().step(server, mean, cohort)
        sums, counts = (torch.stack([one.payload[n].double() for one in updates]).sum(0) for n in (SUMS, COUNTS))
        found = counts > 0
        server[PROTOTYPES][found] = (sums / counts.unsqueeze(1))[found].to(server[PROTOTYPES].dtype)
        server[KNOWN][found], server["begun"] = 1.0, True
        h = torch.stack([one.payload[MEANS].double().flatten() for one in updates]).cpu().numpy()
        variances = np.array([float(one.payload[VARIANCE]) for one in updates])
        weights = np.stack([mixture(h - own, variances) for own in h])
        for name, stack in server["heads"].items():
            heads = torch.stack([one.payload[name].double() for one in updates])
            mixed = torch.tensordot(torch.from_numpy(weights).to(heads.device), heads, 1).to(stack.dtype)
            for update, head in zip(updates, mixed, strict=True):
                stack[update.client_id] = head
        return {"server/own_head": float(weights.diagonal().mean())}


def mixture(away: NDArray[np.float64], variances: NDArray[np.float64]) -> NDArray[np.float64]:
    r"""Weights α (m,) on the simplex that minimise :math:`\sum_j \alpha_j^2 V_j + \|\sum_j \alpha_j a_j\|^2`.

    The function is homogeneous: with P its matrix, :math:`\beta \ge 0` of the least :math:`\beta^\top P \beta +
    (1 - \sum_j \beta_j)^2` has :math:`P\beta \ge 1 - \sum_j \beta_j`, with equality where β is not 0, so that
    :math:`\beta / \sum_j \beta_j` fulfils the conditions of a minimum on the simplex.

    Args:
        away: Vectors a (m, d).
        variances: V (m,), nonnegative.
    """
    matrix = np.diag(variances) + away @ away.T
    values, vectors = np.linalg.eigh(matrix / max(matrix.max(), np.finfo(np.float64).tiny))
    root = np.sqrt(values.clip(min=0))[:, None] * vectors.T
    beta, _ = nnls(np.vstack([root, np.ones(len(root))]), np.append(np.zeros(len(root)), 1.0))
    found: NDArray[np.float64] = beta / beta.sum()
    return found


class BesideMean(fed.Reducer[tuple[fed.Payload, list[fed.ClientUpdate]]]):
    """A mean of some tensors of updates, and every update with the others and the heads."""

    def __init__(self, mean: fed.WeightedMean, model: Collection[str], heads: Collection[str]) -> None:
        self.mean, self.single, self.model, self.heads = mean, fed.Gather(), model, heads

    @override
    def add(self, update: fed.ClientUpdate) -> None:
        payload = update.payload
        self.mean.add(update.with_payload({name: tensor for name, tensor in payload.items() if name in self.model}))
        own = {n: tensor for n, tensor in payload.items() if n in self.heads or n not in self.model}
        self.single.add(update.with_payload(own))

    @override
    def result(self, workers: fed.Workers) -> tuple[fed.Payload, list[fed.ClientUpdate]] | None:
        mean, updates = self.mean.result(workers), self.single.result(workers)
        return None if mean is None or updates is None else (mean, updates)
