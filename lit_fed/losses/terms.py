"""Terms of local and of the server's objectives: proximity, contrast, distillation, frozen classifiers, generators."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

_SMALLEST_VARIANCE = 1e-8  # as in the code of FedDecorr's authors


def model_contrast(features: Tensor, near: Tensor, far: Tensor, temperature: float) -> Tensor:
    r"""Pull features towards one model's and away from another's.

    .. math:: -\log \frac{\exp(\cos(z, z_+)/\tau)}{\exp(\cos(z, z_+)/\tau) + \exp(\cos(z, z_-)/\tau)}

    Li, He, Song: "Model-Contrastive Federated Learning", CVPR 2021, Eq. 3.

    Args:
        features: z (B, d), differentiated through.
        near: z₊ (B, d), constants.
        far: z₋ (B, d), constants.
        temperature: τ.

    Returns:
        A 0-d tensor, the mean over the batch; ln 2 at equal distance.
    """
    cosines = [F.cosine_similarity(features, other.detach(), dim=1) for other in (near, far)]
    # With two classes the cross-entropy of class 0 is softplus(far - near).
    return F.softplus((cosines[1] - cosines[0]) / temperature).mean()


def knowledge_distillation(student: Tensor, teacher: Tensor, temperature: float = 1.0) -> Tensor:
    r"""Knowledge distillation, :math:`\tau^2\,\mathrm{KL}(\sigma(t/\tau)\,\|\,\sigma(s/\tau))`, a mean over the batch.

    Hinton, Vinyals, Dean: "Distilling the Knowledge in a Neural Network", 2015. The factor τ² keeps the gradient's
    scale when τ changes.

    Args:
        student: Logits (B, C), differentiated through.
        teacher: Logits (B, C), constants.
        temperature: τ.

    Returns:
        A 0-d tensor; 0 for equal distributions.

    Note:
        The Kullback-Leibler divergence in place of the cross-entropy: they differ by the teacher's entropy, which has
        no gradient, and the divergence reads as a distance in the logs.
    """
    log_student = F.log_softmax(student / temperature, dim=1)
    log_teacher = F.log_softmax(teacher.detach() / temperature, dim=1)
    divergence = F.kl_div(log_student, log_teacher, reduction="batchmean", log_target=True)
    return temperature**2 * divergence


def not_true_distillation(student: Tensor, teacher: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Knowledge distillation over the C − 1 classes that are not the true one.

    Lee, Jeong, Shin, Bae, Yun: "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning",
    NeurIPS 2022, Eqs. 3 and 4. The true class is removed before the softmax, so its logit gets no gradient.

    Args:
        student: Logits (B, C), differentiated through.
        teacher: Logits (B, C), constants.
        labels: Classes (B,).
        temperature: τ.

    Returns:
        A 0-d tensor: τ² times the divergence, averaged over the batch.
    """
    return knowledge_distillation(_without(student, labels), _without(teacher, labels), temperature)


def _without(logits: Tensor, labels: Tensor) -> Tensor:
    """Logits (B, C) without each row's own class: (B, C − 1)."""
    index = torch.arange(logits.shape[1] - 1, device=logits.device)
    return logits.gather(1, index + (index >= labels.unsqueeze(1)).long())  # a mask would synchronise the device


def dot_regression(cosines: Tensor, labels: Tensor) -> Tensor:
    r"""Dot-regression, :math:`\tfrac12 (\cos(f, v_y) - 1)^2`, a mean over the batch.

    Yang, Chen, Li, Xie, Lin, Tao: "Inducing Neural Collapse in Imbalanced Learning: Do We Really Need a Learnable
    Classifier at the End of Deep Neural Network?", NeurIPS 2022; Kim et al.: "FedDr+", 2024, Eq. 2. It keeps the pull
    towards the own class in the cross-entropy's gradient and drops the push from the other classes (Proposition 1).

    Args:
        cosines: Of features and classes, (B, C), differentiated through.
        labels: Classes (B,).

    Returns:
        A 0-d tensor between 0 and 2.
    """
    of_label = cosines.gather(1, labels.unsqueeze(1)).squeeze(1)
    return 0.5 * (of_label - 1).square().mean()


def feature_distillation(student: Tensor, teacher: Tensor) -> Tensor:
    r"""Distance between raw features, :math:`\tfrac1d \|f - f^g\|_2^2`, a mean over the batch.

    Kim, Jeong, Kim, Cho, Ahn, Yun: "FedDr+: Stabilizing Dot-regression with Global Feature Distillation for Federated
    Learning", 2024, Section 3.2.

    Args:
        student: Features (B, d), differentiated through.
        teacher: Features (B, d), constants.

    Returns:
        A 0-d tensor: the mean over B × d.
    """
    return F.mse_loss(student, teacher.detach())


def decorrelation(features: Tensor) -> Tensor:
    r"""Mean squared entry of the features' correlation matrix, :math:`\tfrac{1}{d^2}\|K\|_F^2`.

    Shi, Liang, Zhang, Tan, Bai: "Towards Understanding and Mitigating Dimensional Collapse in Heterogeneous Federated
    Learning", ICLR 2023.

    Args:
        features: (B, d), differentiated through.

    Returns:
        A 0-d tensor between 1/d (no correlation) and 1; a dimension that is constant over the batch counts 0.
    """
    centred = features - features.mean(0)
    scores = centred / (centred.square().mean(0) + _SMALLEST_VARIANCE).sqrt()
    return (scores.T @ scores / len(features)).square().mean()


def balanced_softmax(logits: Tensor, labels: Tensor, counts: Tensor, gamma: float = 1.0) -> Tensor:
    r"""Balanced softmax, :math:`-\log \frac{n_y^\gamma e^{z_y}}{\sum_c n_c^\gamma e^{z_c}}`, a mean over the batch.

    Ren, Yu, Sheng, Ma, Zhao, Yi, Li: "Balanced Meta-Softmax for Long-Tailed Visual Recognition", NeurIPS 2020;
    with the exponent in Li et al.: "No Fear of Classifier Biases", ICCV 2023 (FedETF).

    Args:
        logits: (B, C), differentiated through.
        labels: Classes (B,).
        counts: Training samples of each class, (C,); an absent class has weight 0 and gets no gradient.
        gamma: γ; 0 is the cross-entropy over all classes, including absent ones.

    Returns:
        A 0-d tensor; infinite for a label whose class has no samples.
    """
    return F.cross_entropy(logits + counts.to(logits.dtype).pow(gamma).log(), labels)


def calibrated_cross_entropy(logits: Tensor, labels: Tensor, counts: Tensor, tau: float = 1.0) -> Tensor:
    r"""Cross-entropy of calibrated logits, :math:`z_c - \tau n_c^{-1/4}`, a mean over the batch.

    Zhang, Li, Li, Xu, Wu, Ding, Wu: "Federated Learning with Label Distribution Skew via Logits Calibration", ICML
    2022.

    Args:
        logits: z (B, C), differentiated through.
        labels: Classes (B,).
        counts: Training samples n of each class, (C,); an absent class has an infinite margin and gets no gradient.
        tau: τ; 0 is the cross-entropy over all classes, including absent ones.

    Returns:
        A 0-d tensor; infinite for a label whose class has no samples.
    """
    margins = tau * counts.to(logits.dtype).pow(-0.25) if tau else 0.0
    return F.cross_entropy(logits - margins, labels)


def restricted_softmax(logits: Tensor, labels: Tensor, counts: Tensor, alpha: float = 0.5) -> Tensor:
    r"""Cross-entropy with the logits of absent classes scaled, :math:`\alpha z_c` where n_c = 0, a mean over the batch.

    Li, Zhan: "FedRS: Federated Learning with Restricted Softmax for Label Distribution Non-IID Data", KDD 2021.

    Args:
        logits: z (B, C), differentiated through.
        labels: Classes (B,).
        counts: Training samples n of each class, (C,).
        alpha: α; 1 is the cross-entropy.
    """
    return F.cross_entropy(torch.where(counts > 0, logits, alpha * logits), labels)


def ensemble_cross_entropy(logits: Tensor, labels: Tensor, shares: Tensor) -> Tensor:
    r"""Cross-entropy of the classifiers with the samples' intended classes, weighted by each client's share.

    .. math:: \frac{1}{B} \sum_b \sum_i \omega_{ib}\,\mathrm{CE}(f_i(x_b), y_b)

    Zhu, Hong, Zhou: "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021.

    Args:
        logits: Of every classifier i, (M, B, C).
        labels: y (B,).
        shares: ω (M, B).
    """
    several, batch, classes = logits.shape
    each = F.cross_entropy(logits.reshape(-1, classes), labels.repeat(several), reduction="none")
    return (each.view(several, batch) * shares).sum(0).mean()


def diversity(noise: Tensor, samples: Tensor) -> Tensor:
    r"""Small for samples that vary with the noise: :math:`\exp(-\mathrm{mean}_{ij}\,\delta_{ij}\,d_{ij})`.

    :math:`\delta_{ij}` is the mean square of :math:`\varepsilon_i - \varepsilon_j`, :math:`d_{ij}` the mean absolute
    value of :math:`G_i - G_j`, and the mean is over all pairs, including each sample with itself.

    Args:
        noise: ε (B, n).
        samples: G (B, …).

    Returns:
        A 0-d tensor; 1 if all samples are equal.
    """
    flat = samples.flatten(1)
    between = (noise.unsqueeze(0) - noise.unsqueeze(1)).square().mean(2)
    apart = torch.cdist(flat, flat, p=1.0) / flat.shape[1]
    return torch.exp(-(between * apart).mean())


def disagreement(teacher: Tensor, student: Tensor) -> Tensor:
    r"""Minus the divergence :math:`\mathrm{KL}(\sigma(t)\,\|\,\sigma(s))` on samples with different predicted classes.

    It drives the generator to samples that the student does not know yet. Zhang et al.: "DENSE: Data-Free One-Shot
    Federated Learning", NeurIPS 2022.

    Args:
        teacher: Logits t (B, C).
        student: Logits s (B, C).

    Returns:
        A 0-d tensor: the mean over the batch; samples of equal predicted class count 0.
    """
    log_teacher, log_student = F.log_softmax(teacher, dim=1), F.log_softmax(student, dim=1)
    divergence = F.kl_div(log_student, log_teacher, reduction="none", log_target=True).sum(1)
    return -(divergence * (teacher.argmax(1) != student.argmax(1))).mean()


def gated_cross_entropy(logits: Tensor, targets: Tensor, gates: Tensor) -> Tensor:
    r"""Cross-entropy of a network with the ensemble, gated: the mean of :math:`g_b\,\mathrm{CE}(p_b, f(x_b))`.

    Args:
        logits: f (B, C).
        targets: p (B, C), probabilities.
        gates: g (B,).
    """
    each = F.cross_entropy(logits, targets.to(logits.dtype), reduction="none")
    return (gates.to(logits.dtype) * each).mean()


def proximal(parameters: Iterable[Tensor], anchors: Iterable[Tensor]) -> Tensor:
    r"""Half the squared distance, :math:`\tfrac12 \sum_i \|w_i - a_i\|^2`.

    Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: "Federated Optimization in Heterogeneous Networks", MLSys 2020, Eq. 2,
    without its factor μ.

    Args:
        parameters: Tensors of any shapes, differentiated through.
        anchors: Constant tensors of the same number and shapes.

    Returns:
        A 0-d tensor; its gradient in each parameter is ``w_i - a_i``.

    Raises:
        ValueError: If the numbers of parameters and anchors differ.
    """
    squares = [(w - a.detach()).square().sum() for w, a in zip(parameters, anchors, strict=True)]
    return 0.5 * torch.stack(squares).sum()


Upsampling = Literal["nearest", "bilinear"]


def resolution_distillation(student: Tensor, teacher: Tensor, upsampling: Upsampling = "nearest") -> Tensor:
    r"""Mean squared distance of enlarged maps to larger ones, :math:`\mathrm{mean}\,(U s - \mathrm{sg}(t))^2`.

    Lim, Lee, Lee, Cho: "Mitigating Resolution-Drift in Federated Learning: Case of Keypoint Detection", 2025, Eq. 5.

    Args:
        student: s (B, K, h, w), differentiated through.
        teacher: t (B, K, h', w'), a constant.
        upsampling: U: copies of the nearest pixel, or ``bilinear`` between centres of pixels, constant beyond the
            outermost.

    Returns:
        A 0-d tensor.

    Note:
        The paper sums over joints and pixels; the mean, as in its public code, gives levels of different size equal
        weight: over the highest level's size, the paper's second of three levels weighs 9/16.
    """
    if student.shape != teacher.shape:
        student = F.interpolate(student, size=teacher.shape[-2:], mode=upsampling)
    return F.mse_loss(student, teacher.detach())
