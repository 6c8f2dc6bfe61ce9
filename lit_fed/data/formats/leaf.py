"""LEAF's data sets, in the JSON files that its scripts write: a user is a client."""

from __future__ import annotations

import json
import string
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from lit_fed.checks import check_range
from lit_fed.data.formats.csv_text import hash_words, token_ids
from lit_fed.data.loaders.transforms import InTurn, Normalize, Resize, Step
from lit_fed.data.partitions.partition import Partition
from lit_fed.data.population.figures import check_channels, figures_instead_of
from lit_fed.data.population.naming import in_order
from lit_fed.data.population.source import Categorical, Columns, TensorSource
from lit_fed.errors import ConfigError

LeafSet = Literal["femnist", "shakespeare", "sent140"]
# The characters of LEAF's models/utils/language_utils.py, in its order.
LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
_CHARACTERS, _SIDE, _TEXT = 80, 28, 4  # of a line, of an image, and the tweet's place in a row
_CLASSES = {
    "femnist": list(string.digits + string.ascii_uppercase + string.ascii_lowercase),
    "sent140": ["negative", "positive"],
}


class LEAF(TensorSource):
    """FEMNIST, Shakespeare or Sent140 of LEAF: ``<root>/train/*.json`` and ``<root>/test/*.json``, a client per user.

    Each file holds ``users`` and, by user, the lists ``x`` and ``y`` in ``user_data``. Without these two folders, the
    files in ``<root>/all_data`` or in `root` itself are read, and a share of every user's samples is held out.
    FEMNIST's inputs are images (1, 28, 28) of white 1 in 62 classes; Shakespeare's are the 80 characters before the one
    to predict, as ids 1 to 80 (0 for an unknown one); Sent140's are tweets as token ids, words hashed as in `CSVText`,
    negative or positive.

    Caldas et al., "LEAF: A Benchmark for Federated Settings", 2018, arXiv:1812.01097.

    Args:
        name: ``femnist``, ``shakespeare`` or ``sent140``.
        root: The folder ``data`` of LEAF's set.
        test_fraction: Share of every user's samples to test on, without folders ``train`` and ``test``.
        length: Tokens of a tweet.
        tokens: Of tweets, token ids are 0 … tokens − 1.
        image_size: Pixels per side to scale FEMNIST's images to, on the device; null keeps 28.
        mean: Of FEMNIST's pixels, one number; null leaves the pixels as they are.
        std: Of FEMNIST's pixels, one number.
        by_user: Whether a user is a client; false leaves users out, so that `partition` cuts all samples.
        partition: Cuts the samples into clients; null for the users, `Natural`.
        kwargs: The population's other settings, see `FederatedDataModule`.

    Raises:
        ConfigError: A file is missing or damaged, or a sample is malformed.
    """

    drawn_as = "leaf"
    too_few = "has too few samples to test on; raise data.test_fraction"

    def __init__(
        self,
        name: LeafSet,
        root: str = "data",
        test_fraction: float = 0.2,
        length: int = 25,
        tokens: int = 8192,
        image_size: int | None = None,
        mean: list[float] | None = None,
        std: list[float] | None = None,
        by_user: bool = True,
        partition: Partition | None = None,
        **kwargs: Any,
    ) -> None:
        self.names_clients = by_user
        names = _CLASSES.get(name)
        super().__init__(test_fraction=test_fraction, class_names=names, partition=partition, root=root, **kwargs)
        check_range("data.length", length, least=1)
        check_range("data.tokens", tokens, least=2, most=2**31 - 1)
        self._set, self.length, self.tokens = name, length, tokens
        self._num_classes_given = len(LETTERS) if names is None else len(names)
        figures_instead_of(None, mean, std)  # refuses one without the other
        settings = {"image_size": image_size, "mean": mean}
        given = [key for key, value in settings.items() if value is not None]
        if given and name != "femnist":
            raise ConfigError(f"data.{given[0]} is a setting of images, and {name} is text; leave it out")
        normalize = Normalize(mean or (0.0,), std or (1.0,), max_value=1.0)
        check_channels(None, normalize.num_channels, channels=1)
        resize = [] if image_size is None else [Resize(image_size)]
        self._side = image_size or _SIDE
        self._prepare = InTurn(normalize, *resize) if given else None

    @property
    @override
    def input_shape(self) -> tuple[int, ...]:
        """(1, image_size, image_size), (80,) or (length,)."""
        sides = (1, self._side, self._side)
        return {"femnist": sides, "shakespeare": (_CHARACTERS,), "sent140": (self.length,)}[self._set]

    @property
    def vocab_size(self) -> int | None:
        """Number of different tokens; None for images."""
        return {"femnist": None, "shakespeare": len(LETTERS) + 1, "sent140": self.tokens}[self._set]

    @override
    def own_clients_are(self) -> tuple[str, str]:
        return f"data.root {self.root}", "set data.by_user to false"

    @override
    def normalization(self) -> InTurn | None:
        return self._prepare

    @override
    def preprocessing(self) -> list[Step] | None:
        """The steps of images; None of texts, which become ids on reading the files."""
        return super().preprocessing() if self._set == "femnist" else None

    @override
    def read(self) -> Columns:
        root = Path(self.root)
        folders = [root / part for part in ("train", "test")]
        if all(folder.is_dir() for folder in folders):
            train, test = map(self._part, folders)
            return replace(train, test=test)
        return self._part(root / "all_data" if (root / "all_data").is_dir() else root)

    def _part(self, folder: Path) -> Columns:
        """The samples of a folder's files, by user."""
        files = sorted(folder.glob("*.json")) if folder.is_dir() else []
        if not files:
            raise ConfigError(
                f"{folder} holds no .json file; set data.root to the folder data that LEAF's preprocess.sh writes, "
                "with its folders train and test"
            )
        by_user = dict[str, tuple[NDArray[Any], NDArray[np.int64]]]()
        for file in files:
            for user, own in self._users(file):
                if user in by_user:
                    raise ConfigError(f"{file}: user {user!r} is also in another file; remove one")
                by_user[user] = own
        names = in_order(by_user)
        if not names:
            raise ConfigError(f"{folder} has no user with samples; sample the set anew")
        sizes = [len(by_user[name][1]) for name in names]
        x, y = (np.concatenate([by_user[name][place] for name in names]) for place in (0, 1))
        clients = Categorical(names, np.repeat(np.arange(len(names)), sizes)) if self.names_clients else None
        return Columns(x, y, clients, source=self.root)

    def _users(self, file: Path) -> Iterator[tuple[str, tuple[NDArray[Any], NDArray[np.int64]]]]:
        """Each user with samples, and these."""
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{file} cannot be read ({str(error)[:100]}); write it anew") from error
        users, data = (content.get(key) if isinstance(content, dict) else None for key in ("users", "user_data"))
        if not isinstance(users, list) or not isinstance(data, dict):
            raise ConfigError(f"{file} has no users and user_data, as LEAF's files have; write it anew")
        for user in users:
            own = data.get(user) if isinstance(user, str) else None
            x, y = (own.get(key) if isinstance(own, dict) else None for key in "xy")
            if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
                raise ConfigError(f"{file}: user {user!r} has no lists x and y of one length; write it")
            if x:
                where = [f"{file}, user {user}, sample {place}" for place in range(len(x))]
                inputs = np.stack([self._input(value, place) for value, place in zip(x, where, strict=True)])
                labels = [self._label(value, place) for value, place in zip(y, where, strict=True)]
                yield user, (inputs, np.array(labels, dtype=np.int64))

    def _input(self, value: Any, where: str) -> NDArray[Any]:
        if self._set == "femnist":
            try:
                pixels = np.asarray(value, dtype=np.float64)
            except (ValueError, TypeError, OverflowError):
                pixels = np.zeros(0)
            if pixels.shape != (_SIDE * _SIDE,) or not (pixels.min() >= 0 and pixels.max() <= 1):
                raise ConfigError(f"{where}: x is not {_SIDE * _SIDE} numbers from 0 to 1; correct it")
            return pixels.reshape(1, _SIDE, _SIDE).astype(self.float_dtype)
        if self._set == "shakespeare":
            if not isinstance(value, str) or len(value) != _CHARACTERS:
                raise ConfigError(f"{where}: x is not a text of {_CHARACTERS} characters; correct it")
            return np.array([LETTERS.find(letter) + 1 for letter in value], dtype=np.int32)
        text = value[_TEXT] if isinstance(value, list) and len(value) > _TEXT else None
        if not isinstance(text, str):
            raise ConfigError(f"{where}: x is not a list with a tweet's text in place {_TEXT}; correct it")
        return token_ids(text, hash_words, self.tokens, self.length)

    def _label(self, value: Any, where: str) -> int:
        if self._set == "shakespeare":
            if not isinstance(value, str) or len(value) != 1 or value not in LETTERS:
                raise ConfigError(f"{where}: y is {value!r:.40}; it must be one of LEAF's {len(LETTERS)} characters")
            return LETTERS.index(value)
        labels = {str(label): label for label in range(len(_CLASSES[self._set]))}
        if self._set == "sent140":
            labels["4"] = 1  # a positive tweet in the original files
        if isinstance(value, bool) or str(value) not in labels:
            raise ConfigError(f"{where}: y is {value!r:.40}; it must be 0 to {max(labels.values())}")
        return labels[str(value)]
