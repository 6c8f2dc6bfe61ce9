"""Cases over data of one's own that are read in several ways: images of every mode, scales, clients."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.bad_inputs.judge import Case
from tests.bad_inputs.options import fit
from tests.data.loaders.test_image_files import REFUSED, SAME
from tests.data.test_across_own_clients import archive, folders, table, tables

_SMALL = ["--data.val_fraction=0", "--model.network=mlp", "--trainer.participation=FullParticipation"]
_OWN = ["--data.partition=Natural", "--data.num_clients=null"]
_FOLDERS = ["--trainer.local_epochs=1", "--data=ClientFolders", "--data.root=images", "--data.image_size=8"]


def image_modes(draw: random.Random) -> Iterator[Case]:
    """A client's image of a mode that is read, or refused when its turn has come."""
    args = fit(*_FOLDERS, *_OWN, *_SMALL)
    while True:
        name = draw.choice([*SAME, *REFUSED])
        make, options = (SAME[name][1], {}) if name in SAME else REFUSED[name][:2]
        grey = draw.choice(["true", "false"])

        def prepare(folder: Path, name: str = name, make: Any = make, options: Any = options) -> None:
            place = Path(folders(folder)) / "ulm" / "x"
            for n in range(5):  # in training and in testing
                (place / f"{n}.png").unlink()
                make().save(place / f"{n}{name}", **options)

        in_colours = name == "n.tif" and grey == "false"  # Lab: Pillow has a way to RGB, and none to grey
        status = (0,) if name in SAME or in_colours else (2, 1)
        yield Case(f"images like {name}, grey {grey}", [*args, f"--data.grayscale={grey}"], prepare, status)


def lost_images(draw: random.Random) -> Iterator[Case]:
    """Files of types that nobody reads, which take a class or a client along, or only themselves."""
    args = fit(*_FOLDERS, *_OWN, *_SMALL)
    while True:
        lost = draw.choice(["ulm/x/*", "ulm/*/*", "*/y/*", "ulm/x/[0-3]*"])
        ending = draw.choice([".heic", ".txt", "", ".png.part"])

        def prepare(folder: Path, lost: str = lost, ending: str = ending) -> None:
            for path in sorted(Path(folders(folder)).glob(lost)):
                path.rename(path.with_name(path.stem + ending))

        whole = lost.endswith("/*")
        yield Case(f"{lost} end in {ending!r}", args, prepare, status=(2,) if whole else (0,))


_BYTES = np.random.default_rng(0).integers(0, 256, (30, 8, 8, 1), dtype=np.uint8)
_TYPES: dict[str, Any] = {
    "bytes": _BYTES,
    "unit": (_BYTES / 255).astype(np.float32),
    "signed": (_BYTES / 255 - 0.5).astype(np.float32),
    "floats to 255": _BYTES * 1.0,
    "integers to 255": _BYTES.astype(np.int64),
}


def mixed_scales(draw: random.Random) -> Iterator[Case]:
    """Training and test images, and clients' files, of several types."""
    while True:
        kinds = [draw.choice([*_TYPES, "bytes", "unit"]) for _ in range(2)]
        by_client = draw.random() < 0.5
        if by_client:
            data = ["--data=ClientArrays", "--data.root=.", "--data.num_clients=2", "--data.stored_shape=[1, 8, 8]"]
            data += ["--data.num_classes=2"]
        else:
            data = ["--data=ArrayFile", "--data.path=a.npz", "--data.num_clients=2", "--data.partition=IID"]

        def prepare(folder: Path, kinds: list[str] = kinds, by_client: bool = by_client) -> None:
            y, (first, second) = np.arange(30) % 2, (_TYPES[kind] for kind in kinds)
            if not by_client:
                np.savez(folder / "a.npz", x_train=first, y_train=y, x_test=second, y_test=y)
                return
            for one, x in enumerate((first, second)):
                (folder / f"client_{one}").mkdir()
                np.savez(folder / f"client_{one}" / "data.npz", x_train=x, y_train=y, x_test=x, y_test=y)

        clear = not any(kind.endswith("255") for kind in kinds) and {*kinds} not in (
            {"bytes", "signed"}, {"unit", "signed"},
        )  # fmt: skip
        where = "clients' files" if by_client else "training and testing"
        yield Case(f"{' and '.join(kinds)} in {where}", fit(*data, *_SMALL), prepare, status=(0,) if clear else (2,))


_CLIENTS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "a column": (table, ["--data=Table", "--data.path=visits.csv", "--data.target=kind", "--data.client=hospital"]),
    "files": (tables, ["--data=Table", "--data.path=sites", "--data.target=kind"]),
    "client_train": (archive, ["--data=ArrayFile", "--data.path=a.npz"]),
    "folders": (folders, _FOLDERS),
}


def dropped_clients(draw: random.Random) -> Iterator[Case]:
    """Clients of one's own, and a partition that an earlier file or option left."""
    while True:
        name = draw.choice([*_CLIENTS])
        prepare, data = _CLIENTS[name]
        left = draw.choice([[], ["--data.partition=IID"], ["--data.partition=Shards"], ["--data.num_clients=2"]])
        if draw.random() < 0.3:
            yield Case(f"clients by {name} who are used", fit(*data, *_OWN, *_SMALL), prepare, status=(0,))
        else:
            yield Case(
                f"clients by {name} and {left or 'the partition of the quickstart'}",
                fit(*data, *_SMALL, *left),
                prepare,
            )
