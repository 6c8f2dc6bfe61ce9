"""Instructions and answers in JSON lines, as bytes; ``python -m examples.language_model.instructions`` draws some."""

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from lit_fed.data import Arrays, Natural, Partition, TensorDataModule
from lit_fed.data.population.files import NewInputs, Records
from lit_fed.data.population.views import viewed
from lit_fed.errors import ConfigError

PAD, ANSWER, END, FIRST = 0, 1, 2, 3  # padding, the answer's begin and end; the token of byte 0


def encode(instruction: str, answer: str | None, length: int, where: str) -> NDArray[np.int32]:
    """Tokens (length,) of an instruction, `ANSWER`, and an answer with `END` unless it is None."""
    prompt = [FIRST + byte for byte in instruction.encode()] + [ANSWER]
    tokens = prompt if answer is None else [*prompt, *(FIRST + byte for byte in answer.encode()), END]
    if len(tokens) > length:
        raise ConfigError(f"{where}: {len(tokens)} tokens; raise data.length, which is {length}, or shorten the text")
    return np.array(tokens + [PAD] * (length - len(tokens)), np.int32)


def decode(tokens: NDArray[Any]) -> str:
    """The text of a row of tokens, up to its end; bytes that are not UTF-8 show as �."""
    return bytes(int(token) - FIRST for token in tokens if FIRST <= token < FIRST + 256).decode(errors="replace")


class Instructions(TensorDataModule):
    """A line of each JSON file is an object with ``instruction``, ``output``, and if the file has clients, ``client``.

    An input is a row of tokens: the instruction's bytes, a token that separates, the answer's bytes, the end, padding.
    The classes are those of ``category``, for partitions by class; without it all lines are of one class.

    Args:
        train_file: JSON lines in `root` to train on.
        test_file: JSON lines to test on.
        length: Tokens of a row.
        partition: Cuts the lines into clients; null for the file's ``client`` if it has them.
        kwargs: The population's settings, see `lit_fed.data.FederatedDataModule`.
    """

    def __init__(
        self,
        train_file: str = "train.jsonl",
        test_file: str = "test.jsonl",
        length: int = 48,
        partition: Partition | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(partition=partition, **kwargs)
        self.length = length
        self._files = (Path(self.root) / train_file, Path(self.root) / test_file)
        if partition is None and self._files[0].is_file() and "client" in read_lines(self._files[0])[0]:
            self.partition = Natural()

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(length,)."""
        return (self.length,)

    @property
    def num_classes(self) -> int:
        """Number of categories."""
        return len(self.class_names)

    @cached_property
    def class_names(self) -> list[str]:
        """Categories of the training lines."""
        return sorted({str(line.get("category", "")) for line in read_lines(self._files[0])})

    def own_client_names(self) -> list[str] | None:
        """Clients of the training lines."""
        return self._clients or None

    @cached_property
    def _clients(self) -> list[str]:
        return sorted({str(line["client"]) for line in read_lines(self._files[0]) if "client" in line})

    def load_arrays(self) -> Arrays:
        """Read and encode both files."""
        names, clients = self.class_names, self._clients
        parts: list[Any] = []
        owners = []
        for path in self._files:
            lines = read_lines(path)
            if odd := {str(line.get("category", "")) for line in lines} - set(names):
                raise ConfigError(f"{path}: category {min(odd)!r} is not in {self._files[0]}; add lines of it there")
            parts.append(np.stack([self._row(line, path, at) for at, line in enumerate(lines)]))
            parts.append(np.array([names.index(str(line.get("category", ""))) for line in lines]))
            named = [str(line.get("client")) for line in lines]
            if clients and (unknown := set(named) - set(clients)):
                raise ConfigError(
                    f"{path}: client {min(unknown)!r} is not in {self._files[0]}; name one of its clients"
                )
            owners.append(np.array([clients.index(name) for name in named]) if clients else None)
        return Arrays(*parts, *owners, source=str(self._files[0].parent))

    def _row(self, line: Mapping[str, Any], path: Path, at: int) -> NDArray[np.int32]:
        if not isinstance(line.get("output"), str):
            raise ConfigError(f"{path}, line {at + 1} lacks a text 'output'; write the answer there")
        return encode(line["instruction"], line["output"], self.length, f"{path}, line {at + 1}")

    def new_inputs(self, path: Path) -> NewInputs:
        """Instructions of another file, with or without answers."""
        lines = read_lines(path)
        asked = [line["instruction"] for line in lines]
        tokens = np.stack([encode(text, None, self.length, f"{path}, line {at + 1}") for at, text in enumerate(asked)])
        loader = self._loader_of(torch.from_numpy(tokens), torch.zeros(len(tokens)))
        return NewInputs(viewed(loader, lambda batch: batch[0]))

    def records(self, columns: Mapping[str, NDArray[Any]], new: NewInputs | None) -> Records | None:
        """Answers as texts."""
        del new
        rows = [{"answer": decode(tokens)} for tokens in columns["answer"]]
        return Records(rows, rows, lambda: Figure())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON-lines file, each with a text ``instruction``."""
    try:
        texts = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8; set data.root to the folder of the files") from error
    lines = []
    for at, text in enumerate(texts):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if not isinstance(line, dict) or not isinstance(line.get("instruction"), str):
            raise ConfigError(f"{path}, line {at + 1} is not a JSON object with a text 'instruction'; correct it")
        lines.append(line)
    if not lines:
        raise ConfigError(f"{path} has no lines; give at least one")
    return lines


WORDS = ("red apple river stone cloud table horse green", "paper window garden music silver summer candle bridge")
TASKS: dict[str, tuple[str, Callable[[str], str]]] = {
    "copy": ("Repeat", lambda word: word),
    "first": ("First letter of", lambda word: word[0]),
    "last": ("Last letter of", lambda word: word[-1]),
    "count": ("Letters in", lambda word: str(len(word))),
    "plural": ("Plural of", lambda word: word + "s"),
}


def draw(folder: Path, train: int = 800, test: int = 100, clients: int = 8) -> None:
    """Write instructions of five kinds on sixteen words; every client asks mostly for two kinds."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    shares = rng.dirichlet(np.full(len(TASKS), 0.5), size=clients)
    for name, count in (("train", train), ("test", test)):
        with open(folder / f"{name}.jsonl", "w", encoding="utf-8") as file:
            for line in range(count):
                kind = str(rng.choice(list(TASKS), p=shares[line % clients]))
                ask, answer = TASKS[kind]
                word = str(rng.choice(" ".join(WORDS).split()))
                content = {"instruction": f"{ask} {word}.", "output": answer(word), "category": kind}
                file.write(json.dumps({**content, "client": f"site {line % clients}"}) + "\n")


if __name__ == "__main__":
    draw(Path("gallery/instructions"))
    print("written to gallery/instructions: train.jsonl, test.jsonl")
