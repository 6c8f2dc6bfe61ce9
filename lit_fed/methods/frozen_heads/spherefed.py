"""SphereFed.

Dong, Zhang, Li, Kung: "SphereFed: Hyperspherical Federated Learning", ECCV 2022. The calibration after training is a
protocol, `CalibratedTest`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.errors import ConfigError
from lit_fed.methods.frozen_heads.frozen import NewHead
from lit_fed.methods.regularizers import features, logits
from lit_fed.networks import CosineHead, orthonormal_classes
from lit_fed.protocols import EvalSubset, Evaluation, Federation, Protocol


class OrthonormalHead(CosineHead):
    """Cosines to frozen orthonormal classes.

    Args:
        num_features: d.
        num_classes: C.
    """

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__(orthonormal_classes(num_classes, num_features))


class SphereFed(NewHead):
    r"""Squared error between cosines to frozen orthonormal classes and the one-hot label.

    :math:`\tfrac1C \| W f / \|f\| - e_y \|^2`, W (C, d) with orthonormal rows, a mean over the batch.

    Args:
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Note:
        The mean runs over B × C, as in the public code of FedDr+: with a sum over classes the learning rate would be C
        times smaller.
    """

    new_head = OrthonormalHead

    def objective(self, client: fed.Client, batch: Any) -> fed.Terms:
        """The squared error."""
        cosines = logits(client, batch)
        target = F.one_hot(client.targets(batch), cosines.shape[1]).to(cosines.dtype)
        return {"mse": F.mse_loss(cosines, target)}


class CalibratedTest(Protocol):
    r"""The global model with a classifier fitted in closed form, on the shared test set: ``calibrated/…``.

    Every client that can be sampled computes two moments of its normalised features φ over its training data, and the
    server solves the least-squares problem of all data:
    :math:`W = \left(\sum_k \sum_i y_{ki} \varphi_{ki}^\top\right) \left(\sum_k \sum_i \varphi_{ki}
    \varphi_{ki}^\top + \lambda I\right)^{-1}` (Dong et al.: "SphereFed", ECCV 2022, fast federated calibration).
    The trained, saved and broadcast model does not change.
    ``calibrated/uplink_bytes`` is the size of the clients' moments, (d + C)·d numbers each.

    Args:
        ridge: λ as a multiple of the mean of the second moments' diagonal.

    Raises:
        ConfigError: For a ridge that is not positive; before training, if the model does not end in cosines.

    Note:
        Clients read their training loader once, with its augmentation. The ridge is ours: after a ReLU many features
        are constant 0 and the second moments singular. A client without samples has no moments.
    """

    name = "calibrated"

    def __init__(self, ridge: float = 1e-3) -> None:
        self.ridge = check_range("CalibratedTest.ridge", ridge, above=0)

    def check(self, federation: Federation) -> None:
        """Refuse a model without a cosine classifier."""
        algorithm = federation.algorithm
        asks = {"logits", "features"} & algorithm.all_needs
        for loop in federation.loops.values():
            if not asks or not isinstance(fed.head_of(loop.model.task, algorithm.head), CosineHead):
                raise ConfigError(
                    "protocol CalibratedTest needs a model that ends in cosines: SphereFed or DotRegression"
                )

    def run(self, federation: Federation, round_idx: int, subset: EvalSubset) -> Evaluation:
        """Collect the moments, solve, test with the solution, and put the model back as it was."""
        (loop,), data, state = federation.loops.values(), federation.data, federation.global_model(round_idx)
        model, head = loop.model, fed.head_of(loop.model.task, federation.algorithm.head)
        if not state or model.split.personal or head is None:
            return Evaluation()
        (weight,) = (name for name, parameter in model.parameters.items() if parameter is head.weight)
        with model.preserved():
            moments, uplink_bytes = self._collect(federation, round_idx, subset)
            if moments is None:
                return Evaluation(absent={self.name: "no client sent the moments of its features"})
            model.load(state)  # the last client may have left personal buffers
            try:
                model.load({weight: solve(moments["second"], moments["cross"], self.ridge)})
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # only if a client forges moments
                return Evaluation(absent={self.name: "the clients' moments do not belong to any features"})
            loader = data.test_loader() if subset == "test" else data.val_loader()
            values = loop.evaluate(loader, subset, spread=True) | {"uplink_bytes": float(uplink_bytes)}
        return Evaluation({f"{self.name}/{metric}": value for metric, value in values.items()})

    def _collect(self, federation: Federation, round_idx: int, subset: EvalSubset) -> tuple[fed.Payload | None, int]:
        """The sum of all clients' moments, None where no client answers; and their uplink in bytes."""
        broadcast, reducer, sent = federation.broadcast(round_idx, "test"), fed.WeightedMean(), 0
        clients = federation.participation.seen_clients.tolist()
        for answer in federation.ask(self.question(federation, subset), clients, broadcast):
            update = federation.channel.receive_one(answer, broadcast)
            reducer.add(update)
            sent += update.uplink_bytes
        return reducer.result(federation.workers), sum(federation.workers.gather(sent))

    def answer(
        self, federation: Federation, client_id: int, broadcast: fed.Broadcast, subset: EvalSubset
    ) -> fed.ClientUpdate | None:
        """One client's moments; None where it has no samples."""
        session = federation.session
        client = session.enter(client_id, broadcast, "test")
        if not client.num_samples:
            return None
        session.loop(client).train(client, [fed.Pass(self.name, client.train_loader(), feature_moments, "sum")])
        sums = client.results[self.name]
        count = sums.pop("count")
        payload = {name: total / count for name, total in sums.items()}
        return fed.ClientUpdate(client_id, payload, client.num_samples, kind=federation.kinds[client_id])

    def layout(self, federation: Federation) -> fed.Layout:
        """The two moments, of float64."""
        (loop,) = federation.loops.values()
        head = fed.head_of(loop.model.task, federation.algorithm.head)
        assert isinstance(head, CosineHead), "checked before"
        classes, features = head.weight.shape
        shapes = {"second": (features, features), "cross": (classes, features)}
        return {name: (torch.float64, torch.Size(shape)) for name, shape in shapes.items()}


def feature_moments(client: fed.Client, batch: Any) -> fed.Tensors:
    """Moments of a client's normalised features φ and one-hot labels y: sums over a batch, in float64.

    Returns:
        ``second``, the sum of φφᵀ, (d, d), ``cross``, the sum of yφᵀ, (C, d), and ``count``, the samples, (1,).
    """
    phi = F.normalize(features(client, batch).double(), dim=1)
    y = F.one_hot(client.targets(batch), logits(client, batch).shape[1]).to(phi)
    return {"second": phi.T @ phi, "cross": y.T @ phi, "count": phi.new_full((1,), len(phi))}


def solve(second: Tensor, cross: Tensor, ridge: float) -> Tensor:
    """The classifier with the least squared error: W with W (S + λI) = R, λ a multiple of the mean diagonal of S.

    Args:
        second: S (d, d).
        cross: R (C, d).
        ridge: λ in units of the mean diagonal.
    """
    damping = ridge * second.diagonal().mean() * torch.eye(len(second), dtype=second.dtype, device=second.device)
    weight: Tensor = torch.linalg.solve(second + damping, cross.T).T
    return weight
