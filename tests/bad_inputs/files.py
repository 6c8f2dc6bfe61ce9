"""Cases over files that people write: configurations, arrays, texts, folders of images, damaged."""

from __future__ import annotations

import io
import random
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.bad_inputs.judge import Case
from tests.bad_inputs.options import QUICKSTART, fit

Damage = Callable[[Path], Any]


# ---------------------------------------------------------------------- any file


def damages_of(draw: random.Random) -> dict[str, Damage]:
    """What may happen to any file."""
    seed = draw.random()

    def torn(path: Path) -> None:
        whole = path.read_bytes()
        path.write_bytes(whole[: int(len(whole) * (0.1 + 0.5 * seed))])

    def overwritten(path: Path) -> None:
        whole, rng = bytearray(path.read_bytes()), random.Random(seed)
        for _ in range(max(8, len(whole) // 50)):
            whole[rng.randrange(len(whole))] = rng.randrange(256)
        path.write_bytes(bytes(whole))

    def a_folder(path: Path) -> None:
        path.unlink()
        path.mkdir()

    def a_loop(path: Path) -> None:
        path.unlink()
        path.symlink_to(path.name)

    return {
        "missing": Path.unlink,
        "empty": lambda path: path.write_bytes(b""),
        "torn": torn,
        "overwritten": overwritten,
        "random bytes": lambda path: path.write_bytes(random.Random(seed).randbytes(3000)),
        "a folder": a_folder,
        "a loop of links": a_loop,
        "NUL": lambda path: path.write_bytes(path.read_bytes()[:40] + b"\0" * 60),
        "one line of text": lambda path: path.write_text("not what was asked for\n"),
        "a page of HTML": lambda path: path.write_text("<!doctype html><html><body>404: not found</body></html>\n" * 9),
    }


def encodings() -> dict[str, Damage]:
    """What may happen to a text; the texts here are ASCII, so that each begins with a letter of other scripts."""

    def encoded(name: str) -> Damage:
        return lambda path: path.write_bytes(("# é\n" + path.read_text()).encode(name))

    return {name: encoded(name) for name in ("utf-16", "utf-32", "latin-1", "cp037")}


# ---------------------------------------------------------------------- configurations

_BROKEN = {
    "a tab": "trainer:\n\tmax_rounds: 1\n",
    "a key twice": "trainer:\n  max_rounds: 1\n  max_rounds: 2\n",
    "a section twice": "trainer: {max_rounds: 1}\ntrainer: {max_rounds: 2}\n",
    "a list": "- trainer\n- data\n",
    "a number": "17\n",
    "a text": "trainer\n",
    "no section": "trainer: null\n",
    "an empty list": "trainer: []\n",
    "a text for a section": "trainer: fast\n",
    "a dotted key": "trainer.max_rounds: 1\n",
    "an unknown section": "trainers: {max_rounds: 1}\n",
    "an unknown key": "trainer: {max_round: 1}\n",
    "an open bracket": "trainer: {max_rounds: [1\n",
    "an open quote": "trainer: {accelerator: 'cpu\n",
    "a Python object": "trainer: !!python/object/apply:os.system ['true']\n",
    "a merge": "trainer: {<<: *nobody}\n",
    "an alias to itself": "trainer: &a {kinds: *a}\n",
    "a billion laughs": "a: &a [x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
    "a thousand brackets": "trainer: " + "[" * 1000 + "]" * 1000 + "\n",
    "a key of numbers": "1: 2\n",
    "a key that is a list": "? [a, b]\n: c\n",
    "several documents": "trainer: {max_rounds: 1}\n---\ntrainer: {max_rounds: 2}\n",
    "a class without a name": "algorithm: {class_path: null}\n",
    "a class of no one": "algorithm: {class_path: lit_fed.methods.Nobody}\n",
    "a class that is a list": "algorithm: {class_path: [FedAvg]}\n",
    "a module": "algorithm: {class_path: lit_fed.methods}\n",
    "a function": "algorithm: {class_path: os.getcwd}\n",
    "settings beside a class": "algorithm: {class_path: FedProx, mu: 1}\n",
    "settings without a class": "algorithm: {init_args: {mu: [1]}}\n",
    "settings that are a list": "algorithm: {class_path: FedProx, init_args: [1]}\n",
    "a byte": "trainer: {max_rounds: !!binary aGk=}\n",
    "a date": "trainer: {max_rounds: 2026-01-01}\n",
    "a set": "trainer: !!set {max_rounds}\n",
    "a control character": "trainer: {max_rounds: 1\x07}\n",
    "a surrogate": 'trainer: {default_root_dir: "\\ud800"}\n',
}


_READ = {"a quoted number": "trainer: {max_rounds: '1'}\n"}
"""What is read as its writer means it: options have no other numbers than texts, and files may have the same."""


def broken_configurations(draw: random.Random) -> Iterator[Case]:
    """A second file beside the quickstart's, or the quickstart's own, damaged; and some that every command reads."""
    for name, text in _READ.items():
        for command in ("fit", "cost"):
            yield Case(
                f"{command} with {name}",
                [*fit(name=command), "-c", "more.yaml"],
                lambda folder, text=text: (folder / "more.yaml").write_text(text),
                status=(0,),
            )
    while True:
        if draw.random() < 0.6:
            name, text = draw.choice([*_BROKEN.items()])
            command = draw.choice(["fit", "fit", "test", "cost"])
            yield Case(
                f"{command} with {name}",
                [*fit(name=command), "-c", "more.yaml"],
                lambda folder, text=text: (folder / "more.yaml").write_text(text),
            )
            continue
        damages = damages_of(draw) | encodings()
        del damages["overwritten"]  # may hit a comment
        kind, damage = draw.choice([*damages.items()])

        def prepare(folder: Path, damage: Damage = damage) -> None:
            lines = Path(QUICKSTART).read_text().splitlines()[1:]
            (folder / "mine.yaml").write_text("\n".join(lines).replace("→", "") + "\n")
            damage(folder / "mine.yaml")

        command = draw.choice(["fit", "validate", "cost", "study", "simulate"])
        yield Case(f"{command} with a configuration that is {kind}", [command, "-c", "mine.yaml"], prepare)


# ---------------------------------------------------------------------- federations


def broken_federations(draw: random.Random) -> Iterator[Case]:
    """A federation's file, or a key of one, damaged."""
    args = ["provision", "-c", "mine.yaml", "--output", "ends"]
    server = "server: {names: [127.0.0.1], port: 9092}"
    sites = f"sites: {{north: {{clients: {[*range(9)]}}}, south: {{clients: {[*range(9, 20)]}}}}}"
    lines = [server, f"config: {QUICKSTART}", sites]

    def good(folder: Path) -> None:
        (folder / "mine.yaml").write_text("\n".join(lines) + "\n")

    yield Case("a federation that is good", args, good, status=(0,))
    keys = ("authority/ca.key", "authority/ca.crt", "server/server.key", "server/server.crt", "server/keys/north.crt")
    while True:
        damages = damages_of(draw)
        del damages["overwritten"]  # may hit a comment
        if draw.random() < 0.5:
            kind, damage = draw.choice([*(damages | encodings()).items()])

            def prepare(folder: Path, damage: Damage = damage) -> None:
                good(folder)
                damage(folder / "mine.yaml")

            yield Case(f"a federation's file that is {kind}", args, prepare)
            continue
        del damages["missing"]  # keys may lie where they are used
        (kind, damage), key = draw.choice([*damages.items()]), draw.choice(keys)

        def damaged(folder: Path, damage: Damage = damage, key: str = key) -> None:
            good(folder)
            path = folder / "ends" / key
            path.parent.mkdir(parents=True)
            path.write_text("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----\n" * 9)
            damage(path)

        yield Case(f"{key} that is {kind}", args, damaged)


# ---------------------------------------------------------------------- arrays

_X = np.random.default_rng(0).integers(0, 256, (60, 8, 8), dtype=np.uint8)
_Y = np.arange(60) % 3


def _arrays() -> dict[str, dict[str, Any]]:
    """Contents of a .npz that cannot be trained on."""
    floats = _X.astype(np.float32)
    broken = floats.copy()
    broken[7, 1, 1] = np.nan
    infinite = floats.copy()
    infinite[59] = np.inf
    good = {"x_train": _X, "y_train": _Y, "x_test": _X, "y_test": _Y}
    return {
        "no labels": {"x_train": _X, "x_test": _X},
        "no inputs": {"y_train": _Y},
        "other names": {"images": _X, "classes": _Y},
        "nothing": {},
        "text labels": good | {"y_train": np.array(["cat", "dog", "cow"] * 20)},
        "labels of no dimension": good | {"y_train": np.array(3)},
        "one-hot labels": good | {"y_train": np.eye(3)[_Y]},
        "labels that are fractions": good | {"y_train": _Y + 0.5},
        "labels that are NaN": good | {"y_train": np.where(_Y == 1, np.nan, _Y)},
        "negative labels": good | {"y_train": _Y - 5},
        "labels of 2**63": good | {"y_train": _Y.astype(np.uint64) + np.uint64(2**63)},
        "labels with a gap": good | {"y_train": _Y * 1_000_000},
        "complex labels": good | {"y_train": _Y + 1j},
        "complex inputs": good | {"x_train": _X + 1j},
        "inputs that are text": good | {"x_train": np.full((60, 8, 8), "a")},
        "inputs that are objects": good | {"x_train": np.array([None] * 60, dtype=object)},
        "dates": good | {"x_train": np.full((60, 8), np.datetime64("2026-01-01"))},
        "fewer labels": good | {"y_train": _Y[:50]},
        "fewer test labels": good | {"y_test": _Y[:50]},
        "no samples": good | {"x_train": _X[:0], "y_train": _Y[:0]},
        "inputs of no size": good | {"x_train": _X[:, :0], "x_test": _X[:, :0]},
        "inputs of no dimension": good | {"x_train": np.array(1.0)},
        "another test shape": good | {"x_test": _X[:, :4]},
        "NaN in training": good | {"x_train": broken, "x_test": floats},
        "infinity in testing": good | {"x_train": floats, "x_test": infinite},
        "inputs beyond 32 bits": good | {"x_train": floats.astype(np.float64) * 1e300, "x_test": floats},
        "one class too many in testing": good | {"y_test": _Y + 7},
        "test labels that are negative": good | {"y_test": _Y - 7},
        "structured labels": good | {"y_train": np.zeros(60, dtype=[("a", int), ("b", int)])},
        "seven dimensions": good
        | {"x_train": _X.reshape(60, 1, 1, 8, 1, 8, 1), "x_test": _X.reshape(60, 1, 1, 8, 1, 8, 1)},
    }


def broken_arrays(draw: random.Random) -> Iterator[Case]:
    """A file of arrays with wrong contents, or damaged."""
    args = fit("--data=ArrayFile", "--data.path=my.npz", "--data.num_clients=5", "--data.partition=IID")
    args += ["--model.network=mlp"]
    good = {"x_train": _X, "y_train": _Y, "x_test": _X, "y_test": _Y}
    yield Case("arrays that are good", args, lambda folder: np.savez(folder / "my.npz", **good), status=(0,))
    while True:
        if draw.random() < 0.75:
            name, arrays = draw.choice([*_arrays().items()])
            yield Case(f"arrays: {name}", args, lambda folder, arrays=arrays: np.savez(folder / "my.npz", **arrays))
            continue
        kind, damage = draw.choice([*damages_of(draw).items(), ("pickled", _pickled), ("huge", _huge)])

        def prepare(folder: Path, damage: Damage = damage) -> None:
            np.savez(folder / "my.npz", x_train=_X, y_train=_Y, x_test=_X, y_test=_Y)
            damage(folder / "my.npz")

        yield Case(f"arrays that are {kind}", args, prepare)


def _pickled(path: Path) -> None:
    np.savez(path, x_train=np.array([{"a": 1}] * 60, dtype=object), y_train=_Y, x_test=_X, y_test=_Y)


def _huge(path: Path) -> None:
    """An array that says it has a trillion values."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f8", "fortran_order": False, "shape": (10**6, 10**3, 10**3)}
    )
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("x_train.npy", header.getvalue() + b"\0" * 64)
        file.writestr("y_train.npy", header.getvalue() + b"\0" * 64)


# ---------------------------------------------------------------------- texts

_ROWS = "".join(f'{n % 4 + 1},"title {n}","some words about number {n}"\n' for n in range(40))
_TEXTS = {
    "a huge label": _ROWS + '99999999999999999999,"a","b"\n',
    "a large label": _ROWS + '1000000,"a","b"\n',
    "a label that is text": _ROWS + 'sport,"a","b"\n',
    "no label": _ROWS + ',"a","b"\n',
    "a label that is a fraction": _ROWS + '1.5,"a","b"\n',
    "a negative label": _ROWS + '-3,"a","b"\n',
    "an open quote": _ROWS + '1,"a,b\n' + _ROWS,
    "too few columns": _ROWS + "1\n",
    "one column": "text\n" * 20,
    "another separator": _ROWS.replace(",", ";"),
    "no rows": "",
    "lines that are empty": "\n\n\n",
    "a field of megabytes": _ROWS + '1,"' + "a" * 200_000 + '","b"\n',
}


def broken_texts(draw: random.Random) -> Iterator[Case]:
    """A file of texts."""
    args = fit(
        "--data=CSVText",
        "--data.root=.",
        "--data.train_file=train.csv",
        "--data.test_file=test.csv",
        "--data.num_clients=5",
    )
    args += ["--data.partition=IID", "--model.network=embedding_bag", "--data.header=false", "--data.label_column=0"]
    args += ["--data.text_columns=[1, 2]", "--data.first_label=1"]
    others = {name: damage for name, damage in encodings().items() if name != "latin-1"}

    def good(folder: Path) -> None:
        for file in ("train.csv", "test.csv"):
            (folder / file).write_text(_ROWS)

    yield Case("texts that are good", args, good, status=(0,))
    while True:
        where = draw.choice(["train.csv", "test.csv"])
        if draw.random() < 0.6:
            name, text = draw.choice([*_TEXTS.items()])

            def write(folder: Path, where: str = where, text: str = text) -> None:
                for file in ("train.csv", "test.csv"):
                    (folder / file).write_text(text if file == where else _ROWS)

            yield Case(f"{where}: {name}", args, write)
            continue
        damages = damages_of(draw) | others
        del damages["torn"], damages["overwritten"]  # what is left may still be rows
        kind, damage = draw.choice([*damages.items()])

        def prepare(folder: Path, where: str = where, damage: Damage = damage) -> None:
            good(folder)
            damage(folder / where)

        yield Case(f"{where} that is {kind}", args, prepare)


# ---------------------------------------------------------------------- clients with names

_NUMBERED = (("01", "1", "2"), ("1", "2", "3"), ("01", "02", "03"), ("-1", "0", "+1"), ("1.0", "1", "null"))
_ABSENT = ("0", "1", "4", "001", "-0", "1.0", "null", "", "[1]", "１", "0x1", " 1", "true")


def named_clients(draw: random.Random) -> Iterator[Case]:
    """A table whose clients' names are numbers, of which some are asked for by something else."""
    args = ["--data=Table", "--data.path=t.csv", "--data.target=kind", "--data.client=who", "--model.network=logistic"]
    args += ["--data.partition=Natural", "--data.num_clients=3", "--trainer.participation=FullParticipation"]
    two = ["--algorithm=FederatedDistillation", "--algorithm.public_size=5"]
    while True:
        names = draw.choice(_NUMBERED)

        def write(folder: Path, names: tuple[str, ...] = names) -> None:
            lines = [f"{name},{n % 2},{n}" for name in names for n in range(20)]
            (folder / "t.csv").write_text("who,kind,x\n" + "\n".join(lines) + "\n")

        def kinds(a: object, b: object, key: str = "clients", two: list[str] = two) -> list[str]:
            return fit(*args, *two, f"--trainer.kinds={{a: {{{key}: {a}}}, b: {{{key}: {b}}}}}")

        absent = draw.choice([name for name in _ABSENT if name not in names])
        position = draw.choice(["3", "-1", "01x", "1.5", "null2", "[0]", str(10**30)])
        yield draw.choice(
            [
                Case(f"kinds by the names {names}", kinds([*names[:1]], [*names[1:]]), write, status=(0,)),
                Case("kinds by position", kinds([0], [1, 2], "client_positions"), write, status=(0,)),
                Case(f"kinds by numbers for {names}", kinds([0], [1, 2]), write),
                Case(f"kinds with {absent!r} for {names}", kinds([absent], [*names[1:]]), write),
                Case(f"kinds with one of {names} twice", kinds([*names[:2]], [*names[1:]]), write),
                Case(f"kinds without one of {names}", kinds([*names[:1]], [*names[1:2]]), write),
                Case("kinds by a position that is none", kinds([0], [1, 3], "client_positions"), write),
                Case("kinds by positions that are texts", kinds(["0"], ["1", "2"], "client_positions"), write),
                Case(f"predict as {absent!r} of {names}", fit(*args, f"--client={absent}", name="predict"), write),
                Case(f"predict at {position}", fit(*args, f"--client_position={position}", name="predict"), write),
                Case(
                    "predict by name and by position",
                    fit(*args, f"--client={names[0]}", "--client_position=0", name="predict"),
                    write,
                ),
            ]
        )


# ---------------------------------------------------------------------- folders of images


def broken_folders(draw: random.Random) -> Iterator[Case]:
    """Clients' folders of images."""
    args = fit(
        "--trainer.local_epochs=1",
        "--data=ClientFolders",
        "--data.root=images",
        "--data.num_clients=5",
        "--data.partition=Natural",
    )
    args += [
        "--model.network=mlp",
        "--data.image_size=8",
        "--data.val_fraction=0",
        "--trainer.participation=FullParticipation",
    ]

    def good(folder: Path) -> Path:
        for client in "abcde":
            for label in "xy":
                place = folder / "images" / client / label
                place.mkdir(parents=True)
                for n in range(6):
                    Image.fromarray(_X[n]).save(place / f"{n}.png")
        return folder / "images"

    def no_classes(root: Path) -> None:
        shutil.rmtree(root / "a" / "x")
        shutil.rmtree(root / "a" / "y")

    def empty(root: Path) -> None:
        shutil.rmtree(root)
        root.mkdir()

    def only_files(root: Path) -> None:
        empty(root)
        Image.fromarray(_X[0]).save(root / "0.png")

    def no_images(root: Path) -> None:
        for path in root.rglob("*.png"):
            path.rename(path.with_suffix(".txt"))

    yield Case("images that are good", args, good, status=(0,))
    whole: dict[str, Damage] = {"a client without classes": no_classes, "nothing": empty, "files": only_files}
    whole |= {"texts": no_images, "no folder": shutil.rmtree}
    while True:
        if draw.random() < 0.4:
            kind, damage = draw.choice([*whole.items()])
            yield Case(f"folders: {kind}", args, lambda folder, damage=damage: damage(good(folder)))
            continue
        damages = damages_of(draw)
        for harmless in ("missing", "a folder", "a loop of links"):
            del damages[harmless]
        kind, damage = draw.choice([*damages.items()])
        name = f"images/{draw.choice('ab')}/{draw.choice('xy')}/{draw.randrange(6)}.png"
        yield Case(
            f"an image that is {kind}",
            args,
            lambda folder, damage=damage, name=name: (good(folder), damage(folder / name)),
            status=(2, 1),
        )
