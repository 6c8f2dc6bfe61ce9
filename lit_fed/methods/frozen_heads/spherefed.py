"""SphereFed.

Dong, Zhang, Li, Kung: "SphereFed: Hyperspherical Federated Learning", ECCV 2022. The server is FedAvg's:
`lit_fed.methods.fedavg.FedAvg`. The calibration after training is a protocol, `CalibratedTest`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from lit_fed.classifier import Classifier
from lit_fed.errors import ConfigError
from lit_fed.frozen import FrozenClassifier
from lit_fed.networks import (
    CosineHead,
    Outputs,
    classifier,
    orthonormal_classes,
    replace_classifier,
    run,
)
from lit_fed.engine.payload import ClientUpdate, Payload
from lit_fed.protocols import EvalSplit, Evaluation, Protocol
from lit_fed.engine.reducers import WeightedMean

if TYPE_CHECKING:
    from lit_fed.federation import Federation


class SphereFed(FrozenClassifier):
    r"""Squared error between cosines to frozen orthonormal classes and the one-hot label.

    :math:`\tfrac1C \| W f / \|f\| - e_y \|^2`, W (C, d) with orthonormal rows, a mean over the batch.

    Args:
        kwargs: Passed on to `lit_fed.classifier.Classifier`.

    Note:
        The mean runs over B × C, as in the public code of FedDr+: with a sum over classes the learning rate would be C
        times smaller.
    """

    def make_head(self) -> None:
        """Frozen orthonormal classes over the features."""
        replace_classifier(
            self.network, lambda num_features, num_classes: CosineHead(orthonormal_classes(num_classes, num_features))
        )

    def objective(self, outputs: Outputs, y: Tensor) -> dict[str, Tensor]:
        """The squared error."""
        target = F.one_hot(y, outputs.logits.shape[1]).to(outputs.logits.dtype)
        return {"mse": F.mse_loss(outputs.logits, target)}


class CalibratedTest(Protocol):
    r"""The global model with a classifier fitted in closed form, on the shared test set: ``calibrated/…``.

    Every client that may be sampled computes two moments of its normalised features φ over its training data, and the
    server solves the least-squares problem of all data at once:
    :math:`W = \left(\sum_k \sum_i y_{ki} \varphi_{ki}^\top\right) \left(\sum_k \sum_i \varphi_{ki}
    \varphi_{ki}^\top + \lambda I\right)^{-1}` (Dong et al.: "SphereFed", ECCV 2022, fast federated calibration).
    The model that is trained, saved and sent stays as it is.
    ``calibrated/uplink_bytes`` are what the clients' moments cost, (d + C)·d numbers each.

    Args:
        ridge: λ as a multiple of the mean of the second moments' diagonal.

    Raises:
        ConfigError: For a ridge that is not positive, and before training if the model does not end in cosines.

    Note:
        The clients go once through their training loader, so augmented data are augmented here as well. The ridge is
        ours: after a ReLU many features are constant 0 and the second moments singular.
    """

    name = "calibrated"

    def __init__(self, ridge: float = 1e-3) -> None:
        if ridge <= 0:
            raise ConfigError(f"CalibratedTest.ridge is {ridge}; it must be positive")
        self.ridge = ridge

    def check(self, federation: Federation) -> None:
        """Refuse a model without a cosine classifier."""
        module = federation.module
        if not isinstance(module, Classifier) or not isinstance(classifier(module.network), CosineHead):
            raise ConfigError("protocol CalibratedTest needs a model that ends in cosines: SphereFed or DotRegression")

    def run(self, federation: Federation, round_idx: int, split: EvalSplit) -> Evaluation:
        """Collect the moments, solve, test with the solution, and put the module back as it was."""
        state, module, data = federation.algorithm.global_state(), federation.module, federation.data
        if not state or module.layout.split.personal or not isinstance(module, Classifier):
            return Evaluation()
        with module.preserved():
            module.load_tensors(state)
            moments, uplink_bytes = self._collect(federation, module, round_idx)
            module.load_tensors(state)  # the last client may have had buffers of its own
            (weight,) = module.head_names()
            module.load_tensors({weight: solve(moments["second"], moments["cross"], self.ridge)})
            loader = data.test_loader() if split == "test" else data.val_loader()
            values = federation.loop.evaluate(loader, split, spread=True) | {"uplink_bytes": float(uplink_bytes)}
        return Evaluation({f"{self.name}/{metric}": value for metric, value in values.items()})

    def _collect(self, federation: Federation, module: Classifier, round_idx: int) -> tuple[Payload, int]:
        """The moments of all clients' samples together, and what they cost."""
        workers, num_samples = federation.workers, federation.data.num_samples
        broadcast, reducer, sent = federation.evaluation_broadcast(round_idx), WeightedMean(), 0
        for client_id in workers.share(federation.participation.seen_clients.tolist(), num_samples):
            ctx = federation.executor.enter(client_id, broadcast, round_idx, "test")
            with federation.fabric.autocast():
                own = feature_moments(module.eval(), federation.loop.batches(ctx.train_loader()))
            payload, uplink_bytes = federation.channel.up(own)
            reducer.add(ClientUpdate(client_id, payload, weight=ctx.num_samples))
            sent += uplink_bytes
        moments = reducer.result(workers)
        assert moments is not None, "a federation has clients"
        return moments, sum(workers.gather(sent))


@torch.no_grad()
def feature_moments(module: Classifier, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """Moments of a client's normalised features φ and one-hot labels y, means over its samples, in float64.

    Args:
        module: The client, in eval mode.
        batches: Its samples.

    Returns:
        ``second``, the mean of φφᵀ, (d, d), and ``cross``, the mean of yφᵀ, (C, d).
    """
    second = cross = torch.zeros(())
    count = 0
    for x, y in batches:
        outputs = run(module.network, x, True)
        assert outputs.features is not None
        phi = F.normalize(outputs.features.double(), dim=1)
        second = second.to(phi) + phi.T @ phi
        cross = cross.to(phi) + F.one_hot(y, outputs.logits.shape[1]).to(phi).T @ phi
        count += len(y)
    return {"second": second / count, "cross": cross / count}


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
