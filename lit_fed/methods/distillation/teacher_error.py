"""The error of the clients' mixture against the predictions of a model that was trained on all clients' data.

Lemma 4.1 of Kovalchuk et al.: "Who to Trust? Aggregating Client Predictions in Federated Distillation", 2026,
arXiv:2509.15147, with Assumption C.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

import lit_fed.algorithm as fed
from lit_fed.callbacks import Callback, RoundRecord, Run
from lit_fed.checks import check_range
from lit_fed.errors import ConfigError
from lit_fed.methods.distillation.exchange import PredictionExchange
from lit_fed.methods.distillation.mixing import SoftmaxSum
from lit_fed.participation import Fate, Participant
from lit_fed.protocols import Federation


class TeacherError(Callback):
    r"""Compares the mixture with a fully informed reference model, one trained on all clients' private data.

    With :math:`p^*` the reference's predictions on the public set, :math:`\xi_i = q_i - p^*` the errors of the clients'
    and :math:`\bar\xi = \sum_i w_i \xi_i` that of the mixture, it logs

    - ``teacher/error``: :math:`\varepsilon = E_x \|p_{agg} - p^*\|^2`, at most 2;
    - ``teacher/client_error``: :math:`E_x \frac{1}{|S|} \sum_i \|\xi_i\|^2`, the mean error of a single client;
    - ``teacher/reference_acc``: the reference's accuracy on the public set;

    and, where the server mixes probabilities, the parts of the error's bound (`lemma`):
    ``teacher/bias`` (:math:`B_w^2`), ``teacher/variance`` (:math:`\sigma^2`), ``teacher/correlation`` (:math:`\rho_c`),
    ``teacher/chi`` (:math:`\chi`) and ``teacher/bound`` (:math:`B_w^2 + \sigma^2 (\rho_c + (1 - \rho_c) \chi)`).
    Training is unaffected: weights are the same bit for bit.

    Args:
        epochs: Passes over all clients' training samples for the reference, before the first round.

    Raises:
        ConfigError: For less than one epoch; before training, for clients that do not exchange predictions.

    Note:
        The reference has the first kind's network and initial weights, and the task's own loss and optimizer, without a
        schedule; a sample that several clients hold counts once. Works with every method of federated distillation.
        Updates are taken before a codec, and late updates are left out. The callback keeps a round's predictions,
        clients × public samples × classes in float64.
    """

    def __init__(self, epochs: int = 30) -> None:
        self.epochs = check_range("TeacherError.epochs", epochs, least=1)
        self.reference: Tensor | None = None  # p* (P, C), float64
        self._on_time: set[int] = set()
        self._sent: dict[int, tuple[Tensor, Tensor]] = {}

    def on_fit_start(self, run: Run) -> None:
        """Train the reference, unless a resumed run has its predictions."""
        _method(run.federation)
        if not run.start_round or self.reference is None:
            self.reference = run.workers.gather(self._train_reference(run.federation).cpu())[0]

    def on_round_start(self, run: Run, round_idx: int, plan: Sequence[Participant]) -> None:
        """Note the clients whose updates will arrive on time."""
        self._on_time = {participant.client_id for participant in plan if participant.fate is Fate.ON_TIME}
        self._sent = {}

    def on_client_end(self, run: Run, update: fed.ClientUpdate) -> None:
        """Keep the client's predictions and scores."""
        if update.client_id in self._on_time:
            values, scores = _method(run.federation).read(update.payload)
            self._sent[update.client_id] = values.double().cpu(), scores.double().cpu()

    def on_round_end(self, run: Run, record: RoundRecord) -> None:
        """Compare, and add to the round's metrics."""
        assert self.reference is not None
        sent = {c: answer for part in run.workers.gather(self._sent) for c, answer in part.items()}
        self._sent = {}
        if not sent:
            return
        method = _method(run.federation)
        values = torch.stack([sent[client_id][0] for client_id in sorted(sent)])
        weights = mixing_weights([sent[client_id][1] for client_id in sorted(sent)], method.temperature)
        found = {"reference_acc": run.federation.data.census.public_accuracy(self.reference.argmax(1).numpy())}
        if method.aggregate == "probabilities":
            found |= lemma(values, weights, self.reference)
        else:
            teacher = torch.einsum("mp,mpc->pc", weights, values).softmax(1)
            found["error"] = _mean_square(teacher - self.reference)
            values = values.softmax(2)
        found["client_error"] = _mean_square(values - self.reference)
        record.metrics.update({f"teacher/{name}": value for name, value in found.items()})

    def state_dict(self) -> dict[str, Any]:
        """The reference's predictions."""
        return {"reference": self.reference}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reference = state["reference"]

    def _train_reference(self, federation: Federation) -> Tensor:
        server = fed.ServerLoop(federation.fabric, federation.loops)
        data, kind = federation.data, federation.kinds.names[0]
        begin, seed = federation.loops[kind].model.copy(), (federation.seed, "teacher error")
        trained, _ = server.train(kind, begin, data.train_dataloader(), _own_loss, epochs=self.epochs, seed=seed)
        return server.predict(kind, trained, data.public_loader()).double().softmax(1)


def mixing_weights(scores: Sequence[Tensor], temperature: float) -> Tensor:
    r"""The weights :math:`w_i(x) = \mathrm{softmax}_i(\tau\,\ell_i(x))` (M, P) of scores ℓ (P,), one a client."""
    total = SoftmaxSum(temperature)
    for score in scores:
        total.add(score.new_empty(len(score), 0), score)
    return torch.stack([total.weight(score) for score in scores])


def lemma(predictions: Tensor, weights: Tensor, reference: Tensor) -> dict[str, float]:
    r"""The error of a mixture and the parts of its bound in Lemma 4.1.

    .. math:: \varepsilon = E_x \Big\|\sum_i w_i \xi_i\Big\|^2 \le B_w^2 + \sigma^2 (\rho_c + (1 - \rho_c) \chi)

    The lemma's expectations at an input are over the outcomes of training, and a run is one outcome. Means over inputs
    of the same class, by the reference, replace them: :math:`\mu_i` is the mean of
    :math:`\xi_i` over these, a client's systematic error on that class, :math:`\tilde\xi_i = \xi_i - \mu_i` the rest.
    :math:`B_w^2 = E_x \|\sum_i w_i \mu_i\|^2`; :math:`\sigma^2` is the largest mean of :math:`\|\tilde\xi_i\|^2` over
    clients and classes, :math:`\rho_c \sigma^2` the largest :math:`|E \langle\tilde\xi_i, \tilde\xi_j\rangle|` of two
    clients; :math:`\chi = E_x \sum_i w_i^2`. For weights that are the same within a class, as the average's are, the
    bound holds for these numbers too; for other weights it needs the lemma's assumption that the rest does not depend
    on them.

    Args:
        predictions: q (M, P, C), probabilities, float64.
        weights: w (M, P), which sum to 1 over the clients.
        reference: p* (P, C).
    """
    errors = predictions - reference
    labels = reference.argmax(1)
    bias, variance, covariance = 0.0, 0.0, 0.0
    for label in labels.unique():
        here = errors[:, labels == label]
        systematic = here.mean(1)
        mixed = torch.einsum("mp,mc->pc", weights[:, labels == label], systematic)
        bias += float(mixed.square().sum()) / len(labels)
        rest = (here - systematic.unsqueeze(1)).flatten(1)
        products = rest @ rest.T / here.shape[1]
        variance = max(variance, float(products.diagonal().max()))
        covariance = max(covariance, float((products - products.diagonal().diag()).abs().max()))
    correlation = covariance / variance if variance else 0.0
    chi = float(weights.square().sum(0).mean())
    return {
        "error": _mean_square(torch.einsum("mp,mpc->pc", weights, errors)),
        "bias": bias,
        "variance": variance,
        "correlation": correlation,
        "chi": chi,
        "bound": bias + variance * (correlation + (1 - correlation) * chi),
    }


def _mean_square(errors: Tensor) -> float:
    """The mean of squared lengths of the last dimension."""
    return float(errors.square().sum(-1).mean())


def _own_loss(task: fed.Objective, batch: Any) -> Tensor:
    loss = task.run(batch).loss
    if loss is None:
        raise ConfigError("callback TeacherError needs a loss from training_step for every batch")
    return loss


def _method(federation: Federation) -> PredictionExchange[Any]:
    """The method that mixes the predictions."""
    method = federation.algorithm
    if not isinstance(method, PredictionExchange):
        raise ConfigError(
            "callback TeacherError needs a method whose clients exchange predictions, such as UWA; algorithm is "
            f"{type(method).__name__}"
        )
    return method
