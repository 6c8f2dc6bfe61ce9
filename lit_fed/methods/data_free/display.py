"""Pictures of a generator's samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from lit_fed.data.population.pictures import even_subset, label_axis, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_CLASSES = 20
_MOST_FEATURES = 256


def generated_picture(samples: NDArray[np.float32]) -> Figure:
    """Images, a row for each class, or the mean features of each.

    Args:
        samples: By class and number: (C, n, channels, height, width) or (C, n, d).
    """
    return samples_picture(samples) if samples.ndim == 5 else latents_picture(samples.mean(axis=1))


def latents_picture(means: NDArray[np.float32]) -> Figure:
    """The mean generated features of each class.

    Args:
        means: The mean features by class (C, d).
    """
    classes, features = even_subset(len(means), _MOST_CLASSES), even_subset(means.shape[1], _MOST_FEATURES)
    figure, axes = new_figure()
    image = axes.imshow(means[np.ix_(classes, features)], aspect="auto", interpolation="nearest")
    figure.colorbar(image, label="mean of the feature")
    label_axis(axes.yaxis, classes, "class")
    axes.set_xlabel("feature")
    axes.set_title("Generated for each class")
    return figure


def samples_picture(samples: NDArray[np.float32]) -> Figure:
    """Generated images, a row for each class.

    Args:
        samples: By class and number (C, n, channels, height, width); only the first channel, or the first three, are
            shown, each image from its smallest value to its largest.
    """
    classes, (_, count, channels, height, width) = even_subset(len(samples), _MOST_CLASSES), samples.shape
    shown = samples[classes][:, :, : 3 if channels >= 3 else 1]
    low, high = shown.min(axis=(2, 3, 4), keepdims=True), shown.max(axis=(2, 3, 4), keepdims=True)
    shown = (shown - low) / np.maximum(high - low, 1e-12)
    framed = np.pad(shown, ((0, 0), (0, 0), (0, 0), (0, 1), (0, 1)), constant_values=1.0)
    grid = framed.transpose(0, 3, 1, 4, 2).reshape(len(classes) * (height + 1), count * (width + 1), -1)
    figure, axes = new_figure()
    axes.imshow(grid.squeeze(-1) if grid.shape[2] == 1 else grid, cmap="gray", interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks(np.arange(len(classes)) * (height + 1) + height / 2, [str(label) for label in classes])
    axes.set_ylabel("class")
    axes.set_title("Generated for each class")
    return figure


def map_picture(places: NDArray[np.float32], classes: NDArray[np.int64], num_real: int) -> Figure:
    """A scatter plot of samples: real samples as dots, pseudo-samples as crosses, one colour per class.

    Args:
        places: Coordinates (n, 2), real samples first.
        classes: (n,).
        num_real: The number of real samples.
    """
    figure, axes = new_figure()
    for part, marker, name in ((slice(num_real), "o", "real"), (slice(num_real, None), "x", "pseudo")):
        axes.scatter(
            places[part, 0],
            places[part, 1],
            c=classes[part],
            cmap="tab10",
            vmin=0,
            vmax=9,
            s=14,
            marker=marker,
            label=name,
            linewidths=0.8,
        )
    axes.legend()
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_title("Real and pseudo-samples: t-SNE of their features")
    return figure
