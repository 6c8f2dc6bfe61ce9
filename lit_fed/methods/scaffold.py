"""SCAFFOLD.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
ICML 2020, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

import lit_fed.algorithm as fed
from lit_fed.errors import ConfigError
from lit_fed.methods.fedavg import FedAvg
from lit_fed.methods.server import positive

CONTROL = "control."  # the server's control variate c in the broadcast, the client's c_i in its state
CHANGE = "control_change."  # in the payload: c_i⁺ − c_i


class Scaffold(FedAvg):
    r"""Corrects the clients' gradients by control variates: :math:`g + c - c_i`.

    After local work the client's control variate becomes, by option,

    - 1: the gradient of its whole objective at the server's model, :math:`c_i^+ = \nabla f_i(w_g)`;
    - 2: the mean gradient of its path, :math:`c_i^+ = c_i - c + (w_g - w_i) / (\tilde K \eta)`.

    It sends its model and the change of its control variate: for the parameters exactly twice FedAvg's bytes, up and
    down. The server moves :math:`w \leftarrow w + \eta_g \,\overline{(w_i - w)}` and
    :math:`c \leftarrow c + \frac{1}{N} \sum_{i \in S} (c_i^+ - c_i)`, with N the number of clients in the population.

    Args:
        option: 1, 2, or null for 2 under ``torch.optim.SGD`` and 1 under any other optimizer; a line before training
            names the choice. Option 1 costs one more pass over the client's data.
        freeze_head: Zero the gradient of the last layer's weight before it is corrected. Not in the paper, but in
            FedDr+'s public code of SCAFFOLD.
        server_lr: η_g.
        weighting: ``uniform`` as in the paper, or ``samples``; the control variates' mean is uniform in any case.
        kwargs: The settings of `lit_fed.methods.fedavg.FedAvg`.

    Raises:
        ConfigError: For another option, a learning rate that is not positive, option 2 under another optimizer than
            ``torch.optim.SGD``, or option 1 of a module that optimises by hand.

    Note:
        :math:`\tilde K` is the number of steps for plain SGD, which is the paper's case. With momentum a step moves
        the weights further than its gradient alone, and :math:`\tilde K` includes this
        (`lit_fed.algorithm.EffectiveSteps`); the number of steps would make the control variates too large by up to
        1/(1 − ρ). The correction comes before gradient clipping.

        Steps of an adaptive optimizer, such as Adam's, are not in proportion to the gradients, so the path gives no
        mean gradient, and option 2 would correct by numbers of another size.

        In option 1, batches weigh by their size, and dropout and batch norm work as in training. After a lost update,
        the client's control variate has changed, and the server's has not.

        ``freeze_head`` does not freeze the last layer: its bias learns, and weight decay and :math:`c - c_i` move its
        weight, as in FedDr+'s code.
    """

    needs = frozenset({"one_optimizer"})

    def __init__(
        self,
        option: Literal[1, 2] | None = None,
        freeze_head: bool = False,
        server_lr: float = 1.0,
        weighting: Literal["samples", "uniform"] = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(weighting, **kwargs)
        self.option = option
        self.freeze_head = freeze_head
        self.server_lr = positive("server_lr", server_lr)
        self.needs = self.needs | ({"loss"} if option == 1 else set()) | ({"head"} if freeze_head else set())

    def setup(self, models: Mapping[str, fed.Model], population: fed.Population) -> fed.Server:
        """Start with a control variate of zeros."""
        server = super().setup(models, population)
        self._reads = self._choose_option(population) == 1
        names = fed.head_names(self.model, self.head) if self.freeze_head else ()
        self._head = {name for name in names if self.model.parameters[name].ndim > 1}  # its weight, not its bias
        return {**server, "control": fed.zeros_like(self.model.tensors(self.model.split.shared))}

    def _choose_option(self, population: fed.Population) -> int:
        """The option for the task's optimizer; 2 where nothing trains, because both send the same."""
        task, optimizer = fed.task_name(self.model.task), self.model.optimizer
        if optimizer is None or fed.EffectiveSteps.measures(optimizer):
            option = self.option or 2
        elif self.option == 2:
            raise ConfigError(
                f"algorithm.option is 2, which measures steps of torch.optim.SGD, and model {task} has "
                f"{optimizer.__name__}; set it to null or 1"
            )
        elif not self.model.task.automatic_optimization:
            raise ConfigError(
                f"model {task} optimises by hand with {optimizer.__name__}, and algorithm Scaffold needs "
                f"{fed.NEEDS['loss']}"
            )
        else:
            option = 1
        if self.option is None and optimizer is not None:
            population.say(f"algorithm.option is null: Scaffold uses option {option} under {optimizer.__name__}")
        return option

    # ------------------------------------------------------------------ client

    def initial_state(self, client: fed.Client) -> fed.Tensors:
        """c_i = 0."""
        return fed.add_prefix(CONTROL, fed.zeros_like(client.model.tensors(client.model.split.shared)))

    def phases(self, client: fed.Client) -> list[fed.Phase | fed.Pass]:
        """In option 1, one pass without steps before training."""
        reads = self._reads and client.stage == "train"
        control = [fed.Phase("control", client.train_loader(), epochs=1, moves=False)] if reads else []
        return [*control, *super().phases(client)]

    def start(self, client: fed.Client) -> fed.Tensors:
        """The global model. Compute the correction c − c_i once; it is empty in tests, which receive no c."""
        control, received = fed.split_prefix(CONTROL, client.state)[0], client.received
        client.results["correction"] = {
            name: received[CONTROL + name] - c_i for name, c_i in control.items() if CONTROL + name in received
        }
        return super().start(client)

    def correct(self, client: fed.Client, gradients: fed.Tensors) -> fed.Tensors:
        """G + c − c_i."""
        correction = client.results["correction"]
        return {n: g + correction[n] if n in correction else g for n, g in self._without_head(gradients).items()}

    def finish(self, client: fed.Client) -> fed.Update:
        """Send the model and c_i⁺ − c_i; keep c_i⁺."""
        w_g, correction = client.received, client.results["correction"]
        control, _ = fed.split_prefix(CONTROL, client.state)
        new = dict(control)
        if self._reads:
            gradients = self._without_head(client.results["control"])
            new |= {name: gradients.get(name, torch.zeros_like(control[name])) for name in correction}
        elif distance := client.steps.distance:
            new |= {n: (w_g[n] - client.model.tensor(n)) / distance - correction[n] for n in correction}
        change = fed.add_prefix(CHANGE, {n: new[n] - control[n] for n in correction})
        return fed.Update({**super().finish(client).payload, **change}, fed.add_prefix(CONTROL, new))

    def _without_head(self, gradients: fed.Tensors) -> fed.Tensors:
        """The gradients, with zeros for the last layer's weight if `freeze_head` is set."""
        return {**gradients, **fed.zeros_like({name: g for name, g in gradients.items() if name in self._head})}

    # ------------------------------------------------------------------ server

    def broadcast(self, server: fed.Server, round_idx: int, kind: str, stage: fed.Stage = "train") -> fed.Payload:
        """The global model and, for training, the control variate."""
        model = super().broadcast(server, round_idx, kind, stage)
        return {**model, **fed.add_prefix(CONTROL, server["control"])} if stage == "train" else model

    def reducer(self, server: fed.Server) -> fed.Reducer[fed.Payload]:
        """One mean for the models, one for the changes."""
        return fed.ByPrefix(super().reducer(server), {CHANGE: fed.WeightedMean(uniform=True)})

    def step(self, server: fed.Server, aggregate: fed.Payload, cohort: fed.Cohort) -> dict[str, float]:
        """Move the model and the control variate."""
        change, mean = fed.split_prefix(CHANGE, aggregate)
        for name, tensor in mean.items():
            w = server["model"][name]
            moves = self.server_lr != 1.0 and name in server["control"]
            w.copy_(w + self.server_lr * (tensor - w) if moves else tensor)
        for name, tensor in change.items():
            server["control"][name].add_(tensor, alpha=cohort.size / cohort.num_clients)
        return {}
