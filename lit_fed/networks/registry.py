"""Networks by name, and one way to their features and classifier wherever they come from."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from lit_fed.errors import ConfigError
from lit_fed.networks.basic import MLP, Logistic, SmallCNN
from lit_fed.networks.mcmahan import McMahanCNN
from lit_fed.networks.mobilenet import MobileNet
from lit_fed.networks.resnet import ResNet18Cifar
from lit_fed.networks.text import BertTiny, EmbeddingBag
from lit_fed.networks.vgg import VGG11

NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "small_cnn": SmallCNN,
    "mlp": MLP,
    "logistic": Logistic,
    "mcmahan_cnn": McMahanCNN,
    "vgg11": VGG11,
    "mobilenet": MobileNet,
    "resnet18_cifar": ResNet18Cifar,
    "embedding_bag": EmbeddingBag,
    "bert_tiny": BertTiny,
}
"""Our own networks by name; they come before timm's. Each takes num_classes, in_channels, input_shape and head_bias."""

TEXT_NETWORKS = frozenset({"embedding_bag", "bert_tiny"})
"""Those of them that read rows of token ids; all others read images."""

POSE_NETWORKS = ("pose_vit_small", "pose_vit_tiny", "pose_cnn", "pose_resnet")
"""Our networks that put out heatmaps by name, for `lit_fed.tasks.KeypointEstimator`; num_classes is their joints."""


def build_network(
    name: str, num_classes: int, in_channels: int, input_shape: tuple[int, ...] | None = None, **kwargs: Any
) -> nn.Module:
    """Build a network by name: one of ours, or any of timm's.

    Args:
        name: A key of `NETWORKS`, one of `POSE_NETWORKS`, or a timm model such as ``"resnet18"``.
        num_classes: Length of the output; of a pose network, its joints.
        in_channels: Channels of the input.
        input_shape: Shape of one example, channels first. A timm model learns the image size (height, width) from it
            if it needs to know; without it, it keeps its own.
        kwargs: Further settings of the network, such as ``width=32`` or, for timm, ``pretrained=True``, which
            downloads weights.

    Returns:
        A module that maps (B, *input_shape) to (B, num_classes), a pose network to (B, num_classes, h, w), with fresh
        weights from torch's global generator.

    Raises:
        ConfigError: If there is no such network, or it does not take these settings.
    """
    if input_shape is not None:
        input_shape = tuple(input_shape)
    if name in NETWORKS:
        return _build_own(name, NETWORKS[name], num_classes, in_channels, input_shape, kwargs)
    if name in POSE_NETWORKS:
        from lit_fed.networks import pose  # brings timm along, see `_build_timm`

        return _build_own(name, pose.NETWORKS[name], num_classes, in_channels, input_shape, kwargs)
    return _build_timm(name, num_classes, in_channels, input_shape, kwargs)


def features(network: nn.Module, x: Tensor) -> Tensor:
    """The vectors that a network's classifier sees, (B, d).

    Args:
        network: One of our networks, a timm model, or any module whose `forward_features` yields (B, d).
        x: A batch, (B, *input_shape).

    Raises:
        ConfigError: If the network has no `forward_features`, or it does not yield flat features.
    """
    forward_features = getattr(network, "forward_features", None)
    if forward_features is None:
        raise ConfigError(
            f"network {type(network).__name__} has no forward_features; add forward_features(x) -> (B, d), or choose "
            "a network of lit_fed or timm"
        )
    found: Tensor = forward_features(x)
    # In timm, forward_features yields a map or tokens; pooling them is the first half of forward_head.
    forward_head = getattr(network, "forward_head", None)
    if forward_head is not None:
        found = forward_head(found, pre_logits=True)
    if found.ndim != 2:
        raise ConfigError(
            f"network {type(network).__name__} yields features of shape {tuple(found.shape)}; forward_features must "
            "yield (batch, features)"
        )
    return found


def classifier(network: nn.Module) -> nn.Module:
    """A network's last layer, which maps its `features` to logits.

    Args:
        network: One of our networks, a timm model, or any module with a `head`.

    Raises:
        ConfigError: If there is no single such layer.
    """
    get_classifier = getattr(network, "get_classifier", None)
    found = get_classifier() if get_classifier is not None else getattr(network, "head", None)
    if not isinstance(found, nn.Module):  # timm's distilled models have a pair of heads
        raise ConfigError(
            f"network {type(network).__name__} has no single classifier; give it a layer named head, or choose "
            "another network"
        )
    return found


def _build_own(
    name: str,
    make: Callable[..., nn.Module],
    num_classes: int,
    in_channels: int,
    input_shape: tuple[int, ...] | None,
    kwargs: dict[str, Any],
) -> nn.Module:
    settings = {"num_classes": num_classes, "in_channels": in_channels, **kwargs}
    if input_shape is not None:
        settings["input_shape"] = input_shape
    signature = inspect.signature(make)
    try:  # against the signature, so that a TypeError from inside the constructor is not mistaken for the user's
        signature.bind(**settings)
    except TypeError as error:
        raise ConfigError(f"network {name!r}: {error}; its settings are {', '.join(signature.parameters)}") from None
    try:
        return make(**settings)
    except ConfigError:
        raise
    except (TypeError, ValueError, RuntimeError, ArithmeticError) as error:  # a value of another type, or out of range
        if not kwargs:
            raise
        given = ", ".join(f"{key}: {value!r}" for key, value in kwargs.items())
        takes = [f"{key}: {one.annotation}" for key, one in signature.parameters.items() if key in kwargs]
        raise ConfigError(
            f"network {name!r} cannot be built with network_args {{{given}}}: {_first_line(error)}; it takes "
            f"{', '.join(takes)}"
        ) from error


def _build_timm(
    name: str, num_classes: int, in_channels: int, input_shape: tuple[int, ...] | None, kwargs: dict[str, Any]
) -> nn.Module:
    import timm  # takes seconds, and many runs need none of its models

    if not timm.is_model(name):
        close = difflib.get_close_matches(name, [*NETWORKS, *POSE_NETWORKS, *timm.list_models()], n=3)
        hint = f"did you mean {', '.join(close)}?" if close else f"choose {', '.join(NETWORKS)} or a timm model"
        raise ConfigError(f"network {name!r} is neither one of ours nor one of timm's; {hint}")
    settings = {"num_classes": num_classes, "in_chans": in_channels, **kwargs}
    try:
        if input_shape is not None and len(input_shape) == 3 and "img_size" not in settings:
            try:
                return _create_timm(timm, name, img_size=input_shape[1:], **settings)
            except TypeError as error:
                # timm has no list of the models that take an image size: convolutional ones refuse it here, before
                # any of their layers is built.
                if not ("unexpected keyword" in str(error) and "img_size" in str(error)):
                    raise
        return _create_timm(timm, name, **settings)
    except TypeError as error:
        if "unexpected keyword" not in str(error):
            raise
        raise ConfigError(f"network {name!r}: {error}; remove that setting") from None
    except OSError as error:
        if not kwargs.get("pretrained"):
            raise
        raise ConfigError(
            f"network {name!r}: its pretrained weights cannot be had ({_first_line(error)}); name a "
            "file of them in network_args.pretrained_cfg_overlay.file, or set network_args.pretrained to false"
        ) from error
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"network {name!r} cannot be built: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else repr(error)


def _create_timm(timm: Any, name: str, **settings: Any) -> nn.Module:
    network: nn.Module = timm.create_model(name, **settings)
    if getattr(getattr(network, "patch_embed", None), "num_patches", None) == 0:  # timm builds it, but it cannot run
        raise ConfigError(
            f"network {name!r} cuts an image of {settings.get('img_size')} pixels into no patches at all; choose a "
            "smaller patch_size or larger images"
        )
    return network
