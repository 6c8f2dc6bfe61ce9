"""FedETF.

Li, Shang, He, Lin, Wu: "No Fear of Classifier Biases: Neural Collapse Inspired Federated Learning with Synthetic and
Fixed Classifier", ICCV 2023.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from lightning import LightningModule
from torch import nn

import lit_fed.algorithm as fed
from lit_fed.checks import check_range
from lit_fed.errors import ConfigError
from lit_fed.losses import balanced_softmax
from lit_fed.methods.frozen_heads.frozen import NewHead
from lit_fed.methods.regularizers import logits, look_up_counts, own_counts
from lit_fed.methods.server import positive
from lit_fed.networks import ProjectedETFHead

FRAME, PROJECTION = "frame", "projection"  # the phases of personalisation's second stage


class FedETF(NewHead):
    r"""Balanced softmax over cosines between projected features and a frozen simplex ETF, at a learnt temperature.

    The loss is `lit_fed.losses.balanced_softmax` with the client's own class counts;
    `lit_fed.networks.ProjectedETFHead` gives the logits. Tests use the logits without the counts.

    Fine-tuning for a test (`lit_fed.protocols.PersonalTest`) has two stages: the parameters that train in a round, with
    the same loss; then, ``alternations`` times, the frame alone and the projection alone, with plain cross-entropy.

    Args:
        gamma: γ of the class weights :math:`n_c^\gamma`; 0 is plain cross-entropy.
        projection_bias: Give the projection a bias.
        alternations: Alternations of frame and projection in the second stage; 0 leaves it out, 20 is the authors'
            code.
        alternation_epochs: Passes over the client's data for each frame and each projection phase.
        frame_lr: Learning rate of the frame.
        projection_lr: Learning rate of the projection.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: For a setting out of range; before training, for a model whose existing projection differs in its
            bias.

    Note:
        A regularizer on features sees the features before the projection, which trains with the loss alone. Under a
        plain ``lightning.Trainer``, without clients, all classes count the same.

        The projection has a bias in the authors' code, but not in FedDr+'s code, which compares methods; our default
        follows the latter.

        The second stage is read from the authors' code: 20 alternations of 3 epochs, learning rates 0.1 and 0.05, the
        frame's vectors free to leave the sphere. There the frame uses SGD without momentum and decay; here frame and
        projection use the task's optimizer at these rates. FedDr+'s comparison has no second stage.
    """

    new_head = ProjectedETFHead

    def __init__(
        self,
        gamma: float = 1.0,
        projection_bias: bool = False,
        alternations: int = 0,
        alternation_epochs: int = 3,
        frame_lr: float = 0.1,
        projection_lr: float = 0.05,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.gamma = check_range("algorithm.gamma", gamma, least=0)
        self.alternations = check_range("algorithm.alternations", alternations, least=0)
        self.alternation_epochs = check_range("algorithm.alternation_epochs", alternation_epochs, least=1)
        self.projection_bias = projection_bias
        self.frame_lr = positive("frame_lr", frame_lr)
        self.projection_lr = positive("projection_lr", projection_lr)

    def make_head(self, num_features: int, num_classes: int) -> nn.Module:
        """The projection and the frame."""
        return ProjectedETFHead(num_features, num_classes, self.projection_bias)

    def place_head(self, task: LightningModule, head: nn.Module) -> None:
        """Replace the head; refuse an existing one with another projection."""
        if isinstance(head, ProjectedETFHead) and (head.projection.bias is not None) is not self.projection_bias:
            raise ConfigError(
                f"algorithm.projection_bias is {str(self.projection_bias).lower()}, and the existing head of model "
                f"{fed.task_name(task)} differs; take a fresh model"
            )
        super().place_head(task, head)

    # ------------------------------------------------------------------ personalisation

    def start(self, client: fed.Client) -> fed.Tensors:
        """The global model; with the downloaded frame if it is about to train, for a teacher.

        Looks up the client's class counts, once for its work.
        """
        look_up_counts(client)
        moving = self.frozen(client.model.task) if self._alternates(client) else ()
        return {**super().start(client), **client.model.copy(moving)}

    def phases(self, client: fed.Client) -> list[fed.Phase | fed.Pass]:
        """The round's work; in fine-tuning also the second stage."""
        phases = super().phases(client)
        if not self._alternates(client):
            return phases
        loader, epochs = phases[-1].loader, self.alternation_epochs
        frame, projection = self.frozen(client.model.task), self._projection(client)
        turn: list[fed.Phase | fed.Pass] = [
            fed.Phase(FRAME, loader, epochs=epochs, trains=frame, lr=self.frame_lr),
            fed.Phase(PROJECTION, loader, epochs=epochs, trains=projection, lr=self.projection_lr),
        ]
        return phases + turn * self.alternations

    def _alternates(self, client: fed.Client) -> bool:
        return client.fine_tuning is not None and self.alternations > 0

    def _projection(self, client: fed.Client) -> tuple[str, ...]:
        """Names of the projection's parameters."""
        head = fed.head_of(client.model.task, self.head)
        assert isinstance(head, ProjectedETFHead), "adapt puts it there"
        of_projection = {id(parameter) for parameter in head.projection.parameters()}
        return tuple(name for name, parameter in client.model.task.named_parameters() if id(parameter) in of_projection)

    # ------------------------------------------------------------------ the loss

    def objective(self, client: fed.Client, batch: Any) -> fed.Terms:
        """The balanced softmax; in the second stage plain cross-entropy."""
        found = logits(client, batch)
        if client.phase in (FRAME, PROJECTION):
            return {"cross_entropy": F.cross_entropy(found, client.targets(batch))}
        return {"balanced": balanced_softmax(found, client.targets(batch), own_counts(client, found), self.gamma)}
