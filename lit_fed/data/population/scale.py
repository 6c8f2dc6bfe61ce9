"""One scale for all stored inputs of a population: what stands for 1 in bytes, and in other numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from lit_fed.errors import ConfigError

Scale = Literal["bytes", "unit", "other"]
"""Bytes, of which 255 stands for 1; floating-point numbers in [0, 1]; other numbers, which are used as they are."""
SCALES: tuple[Scale, ...] = ("bytes", "unit", "other")
BYTES = np.dtype(np.uint8)
BRIGHTEST = 2.0  # of images that are scaled to [0, 1]: resizing may overshoot a little


def scale_of(
    inputs: NDArray[Any], what: str, are_images: bool, max_value: float | None, has_mean: bool
) -> Scale | None:
    """The scale that an array's own type and values say.

    Args:
        inputs: As they are stored.
        what: The file and the array, for messages.
        are_images: Whether they are images.
        max_value: The setting ``data.max_value``.
        has_mean: Whether ``data.mean`` is set, so that any numbers may be meant.

    Returns:
        None where there is nothing, or the setting says it.

    Raises:
        ConfigError: Images have other numbers than bytes, and it is not clear what stands for white.
    """
    if not inputs.size:
        return None
    if inputs.dtype == np.uint8:
        return None if max_value is not None else "bytes"
    low, high = inputs.min(), inputs.max()
    if not (np.isfinite(low) and np.isfinite(high)):
        return None  # refused by its sample, later on
    found = f"{what} holds {inputs.dtype} from {low:g} to {high:g}"
    if max_value is not None:
        if are_images and inputs.dtype.kind == "f" and max_value > BRIGHTEST and low >= 0 and 0 < high <= 1:
            raise ConfigError(
                f"{found}, which data.max_value {max_value:g} makes black: store all images on one scale, or set it "
                "to null"
            )
        return None
    if are_images and not has_mean and low >= 0 and high > BRIGHTEST:
        raise ConfigError(
            f"{found}: set data.max_value to what stands for white, such as 255, or to 1 to use the values as they are"
        )
    return "unit" if inputs.dtype.kind == "f" and low >= 0 and high <= 1 else "other"


def common_scale(scales: Mapping[str, Scale | None]) -> Scale | None:
    """The scale of a population of which every part has its own.

    Args:
        scales: By what messages call a part; None for parts that do not tell.

    Returns:
        Bytes and floating-point numbers in [0, 1] have the latter in common; None where nobody tells.

    Raises:
        ConfigError: Some are bytes, and others numbers beyond [0, 1].
    """
    first = {scale: what for what, scale in reversed(list(scales.items())) if scale is not None}
    if "bytes" in first and "other" in first:
        raise ConfigError(
            f"{first['other']} holds numbers other than from 0 to 1, and {first['bytes']} bytes: store both alike, or "
            "set data.max_value to what stands for 1 in both"
        )
    return next((scale for scale in ("other", "unit", "bytes") if scale in first), None)


def on_scale(inputs: NDArray[Any], scale: Scale | None) -> NDArray[Any]:
    """Inputs as a population of a scale stores them: bytes become numbers in [0, 1] beside such numbers."""
    return inputs.astype(np.float32) / np.float32(255) if inputs.dtype == np.uint8 and scale == "unit" else inputs
