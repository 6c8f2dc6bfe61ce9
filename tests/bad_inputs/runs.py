"""Cases over files that runs write and that tell of runs: checkpoints, clients' states, records, studies, damaged."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from lit_fed.engine.storage.packs import checksum, clients_of, read_pack, write_pack
from tests.bad_inputs.files import Damage, damages_of, encodings
from tests.bad_inputs.judge import Case
from tests.bad_inputs.options import QUICKSTART, TINY, fit
from tests.support import ROOT

# ---------------------------------------------------------------------- runs and their checkpoints


CHANGES = (
    "--trainer.seed=5",
    "--data.num_clients=10",
    "--data.partition=IID",
    "--data.seed=3",
    "--data=Diabetes",
    "--model.network=mlp",
    "--model.network_args={width: 3}",
    "--algorithm=FedAvg",
)
"""What makes it another run."""
RUN = fit("--trainer.max_rounds=2", "--algorithm=Scaffold", "--trainer.participation=FullParticipation")
"""A run of two rounds whose clients keep something."""
RUN_AGAIN = ("--trainer.max_rounds=3", "--algorithm=Scaffold", "--trainer.participation=FullParticipation")
"""The settings of one more round."""


def broken_runs(run: Path) -> Callable[[random.Random], Iterator[Case]]:
    """Cases on copies of a folder in which `RUN` was run."""

    def cases(draw: random.Random) -> Iterator[Case]:
        again = [*RUN, "--trainer.max_rounds=3", "--ckpt_path=lightning_logs/version_0/checkpoints/last.ckpt"]
        yield Case("a run that is good", again, _copied(run), status=(0,))
        files = sorted(path.relative_to(run) for path in run.rglob("*") if path.is_file())
        kept = [path for path in files if path.name.endswith(".r1.states")]  # of round 0, only best.ckpt may name one
        while True:
            command = draw.choice(["fit", "fit", "test", "predict", "validate"])
            args = fit(*RUN_AGAIN, name=command)
            target = "lightning_logs/version_0/checkpoints/last.ckpt"
            chosen = draw.choice(
                ["checkpoint", "checkpoint", "state", "record", "another", "config", "inputs", "output", "export"]
            )
            if chosen in ("inputs", "output"):
                yield draw.choice(
                    _predictions([*fit(*RUN_AGAIN, name="predict"), f"--ckpt_path={target}"], run, chosen)
                )
                continue
            damages = damages_of(draw)
            if chosen == "export":
                kind = draw.choice([*_EXPORTS])
                export = ["export", "--ckpt_path", target]
                yield Case(f"export of {kind}", export, _copied(run, Path(target), _EXPORTS[kind]))
                continue
            if chosen == "checkpoint":
                kind, damage = draw.choice([*damages.items(), *_foreign().items(), *_reduced().items()])
                place = Path(target)
            elif chosen == "state":
                command, place = "fit", draw.choice(kept)
                kind, damage = draw.choice([*damages.items(), *_foreign().items(), *_repacked().items()])
            elif chosen in ("record", "config"):
                command, place = "fit", Path("lightning_logs/version_0")
                place /= "config.yaml" if chosen == "config" else draw.choice(["metrics.csv", "clients.csv"])
                damages |= encodings()
                for harmless in ("missing", "torn", "overwritten", "empty", "a loop of links", "NUL"):
                    del damages[harmless]  # rows may be lost, and are said to be
                if chosen == "config":
                    damages = {"random bytes": damages["random bytes"], "utf-16": damages["utf-16"]}
                kind, damage = draw.choice([*damages.items()])
            else:
                command, place, kind = "fit", Path("x"), "another run's"
                change = draw.choice(CHANGES)
                name = draw.choice(["fit", "test", "predict", "validate"])
                words = [word for word in RUN_AGAIN if word.partition("=")[0] != change.partition("=")[0]]
                again = fit(*words, change, name=name)
                yield Case(
                    f"{name} of another run's checkpoint: {change}", [*again, f"--ckpt_path={target}"], _copied(run)
                )
                continue
            args[0] = command
            if command == "validate":
                args += ["--data.val_fraction=0.1"]
            yield Case(
                f"{command} with {place.name} that is {kind}",
                [*args, f"--ckpt_path={target}"],
                _copied(run, place, damage),
                status=(2, 1) if chosen == "state" else (2,),  # read when its client's turn has come
            )

    return cases


_PIXELS = np.arange(128).reshape(2, 1, 8, 8) % 17  # as the digits are stored, in uint8


def _predictions(args: list[str], run: Path, chosen: str) -> list[Case]:
    """Predictions of a good run on inputs, of which some are none, and to a file that may be there already."""
    inputs: dict[str, Any] = {
        "256": np.where(_PIXELS == 16, 256, _PIXELS),
        "-1": np.where(_PIXELS == 16, -1, _PIXELS),
        "2**40": np.where(_PIXELS == 16, 2**40, _PIXELS),
        "2**63": np.where(_PIXELS == 16, np.uint64(2**63), _PIXELS.astype(np.uint64)),
        "-128 of 8 bits": (_PIXELS - 128).astype(np.int8),
        "floats": _PIXELS / 16,
        "NaN": np.where(_PIXELS == 16, np.nan, _PIXELS),
        "numbers that are texts": _PIXELS.astype(str),
        "truths": _PIXELS > 8,
        "another shape": _PIXELS[:, :, :4],
        "no sample": _PIXELS[:0],
    }
    if chosen == "inputs":

        def written(x: Any) -> Damage:
            def prepare(folder: Path) -> None:
                _copied(run)(folder)
                np.savez(folder / "new.npz", x=x)

            return prepare

        on = [*args, "--inputs=new.npz"]
        cases = [Case(f"predict on inputs with {name}", on, written(x)) for name, x in inputs.items()]
        return [*cases, Case("predict on inputs of 64 bits that are good", on, written(_PIXELS), status=(0,))]

    def there(place: str, what: str) -> Damage:
        def prepare(folder: Path) -> None:
            _copied(run)(folder)
            match what:
                case "file":
                    (folder / place).write_text("mine")
                case "folder":
                    (folder / place).mkdir()
                case "link":
                    (folder / place).symlink_to("nowhere")

        return prepare

    cases = [
        Case(f"predict to a {what} that is there", [*args, f"--output=p.{end}"], there(f"p.{end}", what))
        for what in ("file", "folder", "link")
        for end in ("csv", "npz")
    ]
    export = ["export", "--ckpt_path=lightning_logs/version_0", "--output=."]
    return [
        *cases,
        Case("predict over a folder", [*args, "--output=p.csv", "--overwrite"], there("p.csv", "folder")),
        Case("predict over a file", [*args, "--output=p.csv", "--overwrite"], there("p.csv", "file"), status=(0,)),
        Case("predict to the default file, again", args, there("predictions.csv", "file")),
        Case("--overwrite with a word", [*args, "--overwrite=maybe"], _copied(run)),
        Case("export to where one is", export, there("model.json", "file")),
        Case("export to where a part of one is", export, there("model.onnx", "link")),
        Case("export over a folder", [*export, "--overwrite"], there("model.pt2", "folder")),
        Case("copy to where a file is", ["copy", "quickstart.yaml"], there("quickstart.yaml", "file")),
        Case("copy to a link", ["copy", "quickstart.yaml"], there("quickstart.yaml", "link")),
    ]


def _copied(run: Path, place: Path | None = None, damage: Damage | None = None) -> Damage:
    def prepare(folder: Path) -> None:
        shutil.copytree(run, folder, dirs_exist_ok=True)
        if place is not None and damage is not None:
            damage(folder / place)

    return prepare


def _foreign() -> dict[str, Damage]:
    """Files that torch can read, and that are none of ours."""

    def saved(value: Any) -> Damage:
        return lambda path: torch.save(value, path)

    return {
        "a list": saved([1, 2]),
        "a dictionary of nothing": saved({}),
        "a tensor": saved(torch.zeros(3)),
        "a state of another network": saved({"weight": torch.zeros(2, 2)}),
        "a pickled class": saved(Path("x")),
        "of Lightning's": saved({"epoch": 1, "state_dict": {}, "pytorch-lightning_version": "2.6.0"}),
    }


def _reduced() -> dict[str, Damage]:
    """What is left of a checkpoint that was ours."""

    def cut(path: Path) -> None:
        found = torch.load(path, weights_only=True)
        del found[next(iter(found))]
        torch.save(found, path)

    def swollen(path: Path) -> None:
        found = torch.load(path, weights_only=True)
        torch.save({name: [value] for name, value in found.items()}, path)

    def spoilt(path: Path) -> None:
        found = torch.load(path, weights_only=True)
        next(iter(found["server"]["model"].values())).view(-1)[-1] = float("nan")
        torch.save(found, path)

    def unreadable(path: Path) -> None:
        path.unlink()
        path.symlink_to("/proc/self/mem")  # to read it from its beginning on is an input/output error

    return {"without its first key": cut, "all lists": swollen, "not finite": spoilt, "not to be read": unreadable}


def _handed_over(args: str) -> Damage:
    """A checkpoint of somebody whose configuration asks for more than a network, under settings of the network."""

    def prepare(path: Path) -> None:
        found = torch.load(path, weights_only=True)
        config = yaml.safe_load(found["config"])
        config["model"]["init_args"] |= yaml.safe_load(args)
        torch.save(found | {"config": yaml.safe_dump(config)}, path)

    return prepare


def _bomb(merges: bool) -> Damage:
    """A checkpoint whose configuration stands for more values than there are atoms."""

    def line(n: int) -> str:
        of_all = ", ".join([f"*a{n - 1}"] * 9)
        return f"a{n}: &a{n} {{<<: [{of_all}]}}" if merges else f"a{n}: &a{n} [{of_all}]"

    def prepare(path: Path) -> None:
        found = torch.load(path, weights_only=True)
        begin = "a0: &a0 {x: 1}" if merges else "a0: &a0 [x, x]"
        torch.save(found | {"config": "\n".join([begin, *map(line, range(1, 90)), found["config"]])}, path)

    return prepare


_EXPORTS = {
    "a file to load": _handed_over("{network: resnet10t, network_args: {checkpoint_path: evil.pth}}"),
    "a file to read": _handed_over("{optimizer: ./lightning_logs/version_0/config.yaml}"),
    "the standard input": _handed_over("{optimizer: '-'}"),
    "a bomb of aliases": _bomb(merges=False),
    "a bomb of merges": _bomb(merges=True),
}


def _repacked() -> dict[str, Damage]:
    """Clients' states that are whole, and not where they were."""

    def states(path: Path) -> dict[str, dict[str, torch.Tensor]]:
        return read_pack(path, clients_of(path))

    def without(path: Path, gone: slice) -> None:
        write_pack(path, dict(list(states(path).items())[gone]))

    def whole(path: Path) -> None:
        last, kept = path.parents[1] / "last.ckpt", states(path)
        found, owner = torch.load(last, weights_only=True), next(iter(kept))
        made = {client: {name: tensor.long() for name, tensor in state.items()} for client, state in kept.items()}
        write_pack(path, made)
        table = found["clients"]
        row = table[:, 0].tolist().index(int(owner))
        table[row, 1] = int(table[row, 1]) >> 32 << 32 | checksum(owner, made[owner])
        torch.save(found, last)

    def turned(path: Path) -> None:
        kept = states(path)
        write_pack(path, dict(zip(kept, reversed(kept.values()), strict=True)))

    return {
        "without its first state": lambda path: without(path, slice(1, None)),
        "only its last state": lambda path: without(path, slice(-1, None)),
        "leading out of itself": lambda path: path.write_bytes(
            path.read_bytes().replace(b'"data_offsets":[0,', b'"data_offsets":[-9,', 1)
        ),
        "of whole numbers that are summed up rightly": whole,
        "each client's with another's values": turned,
    }


# ---------------------------------------------------------------------- studies

_STUDY: dict[str, Any] = {
    "title": "t",
    "configs": [QUICKSTART],
    "set": {key: yaml.safe_load(value) for key, value in TINY.items()},
    "metric": "global/acc",
    "seeds": [0],
    "rows": {"a": {}, "b": {"set": {"algorithm.class_path": "FedProx"}}},
    "columns": {"c": {"label": "c"}},
    "claims": [{"says": "x", "claim": "a > b at c"}],
    "profiles": {"pocket": {}},
}
_IN_STUDY: dict[str, Any] = {
    "configs": [["nowhere.yaml"], [], "x", None, [1], [str(ROOT)]],
    "set": [{"trainer.max_round": 1}, {"trainer.max_rounds": "x"}, [1], "x", {"nobody": 1}],
    "metric": ["global/nobody", 1, None, "", ["a"]],
    "seeds": [[], [-1], ["a"], [0.5], "x", [10**30], [0, 0]],
    "rows": [
        {},
        [],
        "a",
        {"a": {"grid": {"trainer.max_rounds": ["x"]}}},
        {"a": {"grid": {"nobody.x": [1]}}},
        {"a": {"sets": {}}},
        {"a": {"configs": ["nowhere.yaml"]}},
        {"../../x": {}},
        {"a/b": {}},
    ],
    "columns": [[], "c", {"c": {"sets": {}}}, {"../x": {}}, {"c": {"metric": 1}}],
    "claims": [
        ["a > nobody"],
        [{"says": "x"}],
        [{"claim": "a > nobody at c"}],
        "x",
        [{"says": "x", "claim": "a >> b"}],
    ],
    "profiles": [[], {"one": {}, "two": {}}, {"pocket": {"sett": {}}}, {"../../esc": {}}],
    "grid": [
        [1],
        {},
        "x",
        {"trainer.max_rounds": 3},
        {"trainer.max_rounds": []},
        {"trainer.max_rounds": [1, 2]},
        {3: [1]},
    ],
    "scale": [float("nan"), "x", float("inf"), 1e300, 1e-300],
    "decimals": [-1, "x", 1.5, 10**9],
    "title": [["a"], {"a": 1}],
    "nobody": [1],
}


def broken_studies(draw: random.Random) -> Iterator[Case]:
    """A study with a wrong value, or a damaged file."""
    args = ["study", "-c", "study.yaml", "--dry_run"]

    def good(folder: Path) -> None:
        (folder / "study.yaml").write_text(yaml.safe_dump(_STUDY, sort_keys=False))

    yield Case("a study that is good", args[:3], good, status=(0,))
    while True:
        if draw.random() < 0.8:
            key = draw.choice([*_IN_STUDY])
            value = draw.choice(_IN_STUDY[key])
            study = _STUDY | {key: value}
            yield Case(
                f"study with {key}: {value!r:.40}",
                args[: draw.choice([3, 4])],
                lambda folder, study=study: (folder / "study.yaml").write_text(yaml.safe_dump(study)),
            )
            continue
        damages = damages_of(draw) | encodings()
        del damages["overwritten"]
        kind, damage = draw.choice([*damages.items()])

        def prepare(folder: Path, damage: Damage = damage) -> None:
            good(folder)
            damage(folder / "study.yaml")

        yield Case(f"study that is {kind}", args, prepare)
