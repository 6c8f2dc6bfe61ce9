"""Pretrained weights from files and folders of timm, Hugging Face and torch: equal values, one line for a misfit."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lit_fed import Classifier
from lit_fed.errors import ConfigError
from lit_fed.networks import Adapter, build_network, hash_of_weights, load_weights

VIT: dict[str, Any] = {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}


def mlp(num_classes: int = 3, seed: int = 0, **settings: Any) -> Any:
    torch.manual_seed(seed)
    return build_network("mlp", num_classes, 1, (1, 2, 2), **settings)


def vit(num_classes: int = 3, size: int = 16, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return build_network("vit_tiny_patch16_224", num_classes, 3, (3, size, size), **VIT)


def plain(network: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def shards(folder: Path, tensors: dict[str, Tensor]) -> Path:
    """The tensors by turns in two files with an index."""
    folder.mkdir()
    parts = [dict(list(tensors.items())[start::2]) for start in (0, 1)]
    names = [f"model-0000{place + 1}-of-00002.safetensors" for place in (0, 1)]
    for name, part in zip(names, parts, strict=True):
        save_file(part, folder / name)
    weight_map = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def written(folder: Path, form: str, tensors: dict[str, Tensor]) -> Path:
    """A file or folder with the tensors, in one of the forms."""
    if form == "shards":
        return shards(folder / "shards", tensors)
    if form == "index":
        return shards(folder / "shards", tensors) / "model.safetensors.index.json"
    if form.startswith("folder/"):
        (folder / "one").mkdir()
        path = folder / "one" / form.removeprefix("folder/")
    else:
        path = folder / f"file{form[form.index('.') :]}"
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    elif form == "ema.pth":
        zeros = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
        torch.save({"state_dict": zeros, "state_dict_ema": tensors, "epoch": 3}, path)
    elif form == "wrapped.pth":
        torch.save({"model": {f"module.{name}": tensor for name, tensor in tensors.items()}}, path)
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=form != "old.pth")
    return path.parent if form.startswith("folder/") else path


@pytest.mark.parametrize(
    "form",
    ["plain.safetensors", "shards", "index", "folder/model.safetensors", "folder/pytorch_model.bin", "plain.bin",
     "old.pth", "ema.pth", "wrapped.pth"],
)  # fmt: skip
def test_every_form_gives_the_values_of_the_file(tmp_path: Path, form: str) -> None:
    source, network = mlp(), mlp(seed=1)
    load_weights(network, written(tmp_path, form, plain(source)))
    assert all(torch.equal(tensor, source.state_dict()[name]) for name, tensor in network.state_dict().items())


def test_a_file_is_known_by_its_sha256_and_a_folder_by_sha256sums_lines(tmp_path: Path) -> None:
    file, folder = written(tmp_path, "plain.safetensors", plain(mlp())), written(tmp_path, "shards", plain(mlp()))
    assert hash_of_weights(file, "weights") == hashlib.sha256(file.read_bytes()).hexdigest()
    lines = [
        f"{hashlib.sha256(one.read_bytes()).hexdigest()}  {one.name}\n" for one in sorted(folder.glob("*.safetensors"))
    ]
    assert [line[64:78] for line in lines] == ["  model-00001-", "  model-00002-"]
    assert hash_of_weights(folder, "weights") == hashlib.sha256("".join(lines).encode()).hexdigest()


def test_timms_own_file_starts_another_head_and_another_grid_as_timm_does(tmp_path: Path) -> None:
    pytest.importorskip("timm", "1.0.31")  # reads weights
    from timm.models import save_for_hf

    source = vit(num_classes=5)
    save_for_hf(source, str(tmp_path), safe_serialization=True)
    file = tmp_path / "model.safetensors"
    with pytest.raises(ConfigError, match=r"has 'head.bias' of \(5,\) in place of \(3,\), 'head.weight' .*; set "
                                          "model.weights_of to backbone to leave the file's head out"):  # fmt: skip
        load_weights(network := vit(seed=1), tmp_path, network.head)
    network = vit(size=32, seed=1)
    first = plain(network)
    load_weights(network, tmp_path, network.head, "backbone")
    theirs = timm.create_model(
        "vit_tiny_patch16_224", pretrained=True, pretrained_cfg_overlay={"file": str(file), "num_classes": 5},
        num_classes=3, img_size=32, **VIT,
    )  # fmt: skip
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, first[name] if name.startswith("head") else theirs.state_dict()[name]), name
    assert network.pos_embed.shape == (1, 1 + 8 * 8, 32)  # from 4×4, computed: other machines may round differently


def test_a_model_of_transformers_lends_its_body_and_its_shards(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=128, num_hidden_layers=1, num_attention_heads=2, intermediate_size=256
    )
    source = transformers.BertForMaskedLM(config)
    source.save_pretrained(tmp_path, max_shard_size="300KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    target = transformers.BertForSequenceClassification(config)
    pooler = plain(target.bert.pooler)
    with pytest.raises(ConfigError, match=r"lacks 'bert.pooler.dense.weight', .* and also has 'cls.predictions.bias'"):
        load_weights(target, tmp_path)  # a masked model has no pooler
    whole = transformers.BertForSequenceClassification(config)
    whole.save_pretrained(tmp_path / "whole")
    load_weights(target, tmp_path / "whole", target.classifier, "backbone")
    assert all(
        torch.equal(one, two) for one, two in zip(target.bert.parameters(), whole.bert.parameters(), strict=True)
    )
    assert not torch.equal(target.bert.pooler.dense.weight, pooler["dense.weight"])
    assert not torch.equal(target.classifier.weight, whole.classifier.weight)
    body = transformers.BertModel(config)
    body.save_pretrained(tmp_path / "body")
    load_weights(target, tmp_path / "body", target.classifier, "backbone")  # names without the prefix ``bert.``
    assert torch.equal(target.bert.embeddings.word_embeddings.weight, body.embeddings.word_embeddings.weight)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 4)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 5, bias=False)
        self.out.weight = self.words.weight
        self.register_buffer("places", torch.arange(3), persistent=False)


def test_tied_weights_are_named_once_and_old_files_may_hold_passing_buffers(tmp_path: Path) -> None:
    source, network, path = Tied(), Tied(), tmp_path / "model.pth"
    held = {name: tensor for name, tensor in source.state_dict().items() if name not in ("out.weight",)}
    del held["norm.num_batches_tracked"]  # files of torch before 0.4.1 lack it
    torch.save({**held, "places": torch.arange(3)}, path)
    load_weights(network, path)
    assert network.out.weight is network.words.weight
    assert torch.equal(network.words.weight, source.words.weight)


def test_half_precision_becomes_the_networks_own(tmp_path: Path) -> None:
    source, network, path = mlp(), mlp(seed=1), tmp_path / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in plain(source).items()}, path)
    load_weights(network, path)
    assert torch.equal(network.head.weight, source.head.weight.bfloat16().float())
    assert network.head.weight.dtype is torch.float32


def altered(**changes: Tensor | None) -> dict[str, Tensor]:
    tensors: dict[str, Tensor | None] = {
        **plain(mlp()),
        **{key.replace("__", "."): one for key, one in changes.items()},
    }
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (altered(head__bias=None), "it lacks 'head.bias'; set model.weights_of to backbone"),
        (altered(head__bias=None, head__bais=torch.zeros(3)), "it lacks 'head.bias' and also has 'head.bais'; set "),
        (altered(head__weight=torch.zeros(3, 9)), r"it has 'head.weight' of \(3, 9\) in place of \(3, \d+\); set "),
        (altered(extra__weight=torch.zeros(1)), "it also has 'extra.weight'; set model.weights_of to backbone"),
        (altered(**{f"extra__{place}": torch.zeros(1) for place in range(9)}), "'extra.2' and 6 more"),
        (altered(head__bias=torch.zeros(3, dtype=torch.uint8)), r"has 'head.bias' of \(3,\) uint8 in place of \(3,\)"),
        (altered(head__weight__absmax=torch.zeros(1)), r"'head.weight.absmax' is of weights in 4 or 8 bits \(bitsandb"),
        (
            {"head.weight.quant_state.bitsandbytes__nf4": torch.zeros(4, dtype=torch.uint8)},
            "4 or 8 bits .*; name the weights before quantization",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_refused_in_one_line(
    tmp_path: Path, tensors: dict[str, Tensor], message: str
) -> None:
    network, path = mlp(seed=1), tmp_path / "model.safetensors"
    first = plain(network)
    save_file(tensors, path)
    with pytest.raises(ConfigError, match=message) as caught:
        load_weights(network, path, network.head)
    assert str(caught.value).startswith("model.weights is '")
    assert "\n" not in str(caught.value)
    assert all(torch.equal(tensor, first[name]) for name, tensor in network.state_dict().items())


def test_a_body_of_other_depth_is_refused_without_its_head_too(tmp_path: Path) -> None:
    deep, shallow, path = mlp(hidden=[8, 8]), mlp(hidden=[8]), tmp_path / "model.safetensors"
    save_file(plain(deep), path)
    with pytest.raises(ConfigError, match=r"it also has 'body.*; choose the network and the settings of the file"):
        load_weights(shallow, path, shallow.head, "backbone")
    save_file(plain(shallow), path)
    with pytest.raises(ConfigError, match="it lacks 'body"):
        load_weights(deep, path, deep.head, "backbone")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model.safetensors.index.json": "{"}, "cannot be read"),
        ({"model.safetensors.index.json": "[]"}, "cannot be read"),
        ({"model.safetensors.index.json": "{}"}, "has no weight_map of files beside it"),
        (
            {"model.safetensors.index.json": '{"weight_map": {"a": "../other.safetensors"}}'},
            "no weight_map of files be",
        ),
        (
            {"model.safetensors.index.json": '{"weight_map": {"a": "one.safetensors"}}'},
            "lacks the file one.safetensors",
        ),
        (
            {"config.json": '{"quantization_config": {"quant_method": "bitsandbytes"}}'},
            r"_config \(bitsandbytes\); name",
        ),
        ({"readme.md": ""}, "the folder has neither of model.safetensors.index.json, model.safetensors, pytorch_model"),
        ({"model.safetensors": "version https://git-lfs"}, "model.safetensors holds more than weights, or is damaged"),
        ({"pytorch_model.bin": ""}, "pytorch_model.bin holds more than weights, or is damaged"),
    ],
)
def test_a_folder_that_cannot_be_read_is_refused(tmp_path: Path, content: dict[str, str], message: str) -> None:
    for name, text in content.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_weights(mlp(), tmp_path)
    assert "\n" not in str(caught.value)


class Code:
    def __reduce__(self) -> Any:
        return print, ("run",)


def test_a_file_with_code_or_a_flipped_bit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.pth"
    torch.save({"state_dict": plain(mlp()), "args": Code()}, path)
    with pytest.raises(ConfigError, match=r"holds more than weights, or is damaged: Weights only load failed$"):
        load_weights(mlp(), path)
    assert "run" not in capsys.readouterr().out
    torch.save(plain(mlp()), path)
    content = bytearray(path.read_bytes())
    content[content.index(mlp().head.bias.detach().numpy().tobytes())] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"damaged: .* differs from its checksum"):
        load_weights(mlp(), path)
    with pytest.raises(ConfigError, match=r"model.weights is 'no.pth'; the file does not exist"):
        load_weights(mlp(), "no.pth")


def test_a_task_starts_from_its_file_and_refuses_a_second_source(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(plain(mlp(10)), path)
    shape: dict[str, Any] = {"in_channels": 1, "input_shape": (1, 2, 2)}
    task = Classifier("mlp", weights=str(path), adapter=Adapter(2), **shape)
    assert torch.equal(task.head.get_parameter("weight"), mlp(10).head.weight)
    with pytest.raises(ConfigError, match=r"model.weights and model.network_args.pretrained both name weights"):
        Classifier("vit_tiny_patch16_224", weights=str(path), network_args={"pretrained": True})
    with pytest.raises(ConfigError, match=r"Classifier.weights_of is 'body'; it must be 'all' or 'backbone'"):
        Classifier("mlp", weights=str(path), weights_of="body", **shape)  # type: ignore[arg-type]  # the odd word
    with pytest.raises(ConfigError, match=r"model.weights_of is 'backbone', and Linear has no head; set it to 'all'"):
        Classifier(nn.Linear(1, 2), weights=str(path), weights_of="backbone")
