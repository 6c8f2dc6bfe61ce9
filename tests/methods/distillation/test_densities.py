"""Class Gaussians against SciPy's and scikit-learn's."""

from __future__ import annotations

import numpy as np
import torch
from scipy.special import logsumexp
from scipy.stats import multivariate_normal, norm
from sklearn.mixture import GaussianMixture

from lit_fed.methods.distillation.densities import ClassGaussians, fit_class_gaussians, log_density

GENERATOR = np.random.default_rng(0)


def blobs(classes: tuple[int, ...] = (1, 4, 7), count: int = 30) -> tuple[torch.Tensor, torch.Tensor]:
    labels = np.repeat(classes, count)
    return torch.from_numpy(GENERATOR.normal(size=(len(labels), 5)) * 3 + labels[:, None]), torch.from_numpy(labels)


def test_log_density_is_scipys() -> None:
    z, y = blobs()
    fitted = fit_class_gaussians(z, y)
    x = torch.from_numpy(GENERATOR.normal(size=(40, 5)) * 50)
    parts = [multivariate_normal(m, np.diag(v)).logpdf(x) for m, v in zip(*map(np.asarray, fitted), strict=True)]
    expected = logsumexp(np.stack(parts), axis=0) - np.log(3)
    np.testing.assert_allclose(log_density(x, fitted).numpy(), expected, rtol=1e-10)
    assert expected.min() < -100


def test_one_class_is_sklearns_mixture_of_one() -> None:
    z, y = blobs((3,))
    sklearn = GaussianMixture(1, covariance_type="diag", reg_covar=0).fit(z.numpy())
    fitted = fit_class_gaussians(z, y)
    np.testing.assert_allclose(fitted.mean, sklearn.means_)
    np.testing.assert_allclose(fitted.variance, sklearn.covariances_)
    np.testing.assert_allclose(log_density(z, fitted), sklearn.score_samples(z.numpy()))


def test_by_hand() -> None:
    # Class 0: 1 and 3, μ = 2, σ² = 1; class 2: 5 and 9, μ = 7, σ² = 4. The mean variance is 2.5, its floor 3.5e-6.
    fitted = fit_class_gaussians(torch.tensor([[1.0], [3.0], [5.0], [9.0]]), torch.tensor([0, 0, 2, 2]))
    assert fitted.mean.tolist() == [[2.0], [7.0]]
    assert fitted.variance.tolist() == [[1.0], [4.0]]
    # At 3: ½·N(3; 2, 1) + ½·N(3; 7, 2²) = ½·0.241971 + ½·0.026995 = 0.134483.
    assert norm(2, 1).pdf(3) / 2 + norm(7, 2).pdf(3) / 2 - 0.134483 < 1e-6
    np.testing.assert_allclose(log_density(torch.tensor([[3.0]]), fitted).exp(), [0.134483], atol=1e-6)


def test_a_constant_logit_gets_the_floor() -> None:
    # Variances: dimension 0 is constant, 0; dimension 1 is 4. Their mean is 2, the floor 2e-6 + 1e-6.
    fitted = fit_class_gaussians(torch.tensor([[1.0, 0.0], [1.0, 4.0]]), torch.tensor([5, 5]))
    np.testing.assert_allclose(fitted.variance, [[3e-6, 4.0]])


def test_a_class_of_one_sample_is_dropped_and_none_is_minus_infinity() -> None:
    z = torch.tensor([[0.0, 1.0], [2.0, 3.0], [9.0, 9.0]])
    fitted = fit_class_gaussians(z, torch.tensor([1, 1, 4]))
    assert fitted.mean.tolist() == [[1.0, 2.0]]
    for labels, logits in ((torch.tensor([0, 1, 4]), z), (torch.tensor([], dtype=torch.long), z[:0])):
        empty = fit_class_gaussians(logits, labels)
        assert empty.mean.shape == empty.variance.shape == (0, 2)
        assert log_density(z, empty).tolist() == [float("-inf")] * 3


def test_far_away_is_a_large_finite_number() -> None:
    gaussians = ClassGaussians(torch.zeros(1, 2), torch.full((1, 2), 1e-6))
    assert -2e9 < log_density(torch.full((1, 2), 40.0), gaussians).item() < -1e9
