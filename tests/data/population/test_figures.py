"""``data.normalize``: the figures of a federation in place of `mean` and `std`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lit_fed.data import ArrayFile, ClientArrays, ClientFolders, Digits, FederatedDataModule, Table
from lit_fed.data.population.figures import fingerprint, read_figures
from lit_fed.errors import ConfigError
from lit_fed.federation.messages.settings import agreed, difference
from lit_fed.federation.statistics.federation import first_question, simulated
from lit_fed.federation.statistics.noise import Noise
from lit_fed.federation.statistics.site import columns_of
from lit_fed.privacy import SampleLevel
from tests.support import LeastSquares, fit, weights


def statistics_of(data: FederatedDataModule, path: Path, noise: Noise | None = None, ranges: Any = None) -> str:
    question = first_question(columns_of(data), 10, 1, ranges, noise)
    data.setup()
    path.write_text(simulated(data, question, noise).json())
    return str(path)


def write_rows(folder: Path) -> Path:
    drawn = np.random.default_rng(5)
    path = folder / "rows.csv"
    rows = [f"{a},{b:.4f},{site},{'ny'[int(a > 50)]}" for a, b, site in zip(
        drawn.integers(0, 100, 120), drawn.normal(3, 2, 120), drawn.integers(0, 3, 120), strict=True)]  # fmt: skip
    path.write_text("\n".join(["a,b,site,y", *rows]) + "\n")
    return path


def rows(path: Path, **kwargs: Any) -> Table:
    return Table(str(path), target="y", features=["a", "b"], client="site", **kwargs)


def test_a_tables_figures_are_the_pooled_ones(tmp_path: Path) -> None:
    """Of training rows, to 1e-6, as `Table` takes them from all rows at once."""
    path = write_rows(tmp_path)
    pooled, ours = rows(path), rows(path, normalize=statistics_of(rows(path), tmp_path / "s.json"))
    for data in (pooled, ours):
        data.setup()
    x, y = (next(iter(data.test_loader()))[0] for data in (pooled, ours))
    assert torch.allclose(x, y, rtol=0, atol=1e-6)
    steps = [(data.preprocessing() or [{}])[0] for data in (pooled, ours)]
    for key in ("mean", "std"):
        assert steps[0][key] == pytest.approx(steps[1][key], abs=1e-6)


def test_a_run_normalised_by_them_is_one_normalised_by_the_pooled_figures(tmp_path: Path) -> None:
    path = write_rows(tmp_path)
    file = statistics_of(rows(path), tmp_path / "s.json")
    found = []
    for name, data in (("pooled", rows(path)), ("ours", rows(path, normalize=file))):
        found.append(weights(fit(tmp_path / name, LeastSquares(lr=0.1), data, max_rounds=3)))
    for name, tensor in found[0].items():
        assert tensor.abs().max() > 1e-2
        assert torch.allclose(tensor, found[1][name], rtol=0, atol=1e-6)


def test_images_of_bytes_and_of_files(tmp_path: Path) -> None:
    """Pixels of 0 to 16 by Digits' own maximum; its constants 0.3053 and 0.3760 are rounded."""
    file = statistics_of(Digits(num_clients=4), tmp_path / "s.json")
    (mean,), (std,) = read_figures(Path(file)).of_inputs()
    stored = Digits()
    stored.setup()
    pixels = stored.stored("train", np.arange(1438))[0] / 16
    assert [mean, std] == pytest.approx([pixels.mean(), pixels.std()], rel=1e-12)
    (step,) = Digits(normalize=file).preprocessing() or [{}]
    assert step == {"step": "normalize", "mean": [mean], "std": [std], "max_value": 16.0}


def test_a_constant_column_is_only_shifted(tmp_path: Path) -> None:
    x = np.tile(np.array([2.0, 7.0], np.float32), (20, 1))
    np.savez(tmp_path / "a.npz", x_train=x, y_train=np.arange(20) % 2, x_test=x[:2], y_test=np.arange(2))
    file = statistics_of(ArrayFile(str(tmp_path / "a.npz"), num_clients=2), tmp_path / "s.json")
    assert read_figures(Path(file)).of_inputs() == ([2.0, 7.0], [1.0, 1.0])


GOOD: dict[str, Any] = {
    "lit_fed_statistics": 1,
    "privacy": None,
    "all": {"columns": [
        {"name": "a", "role": "input", "mean": 1.0, "variance": 4.0},
        {"name": "b", "role": "input", "mean": 2, "variance": 0},
        {"name": "y", "role": "target", "mean": None, "variance": None},
    ]},
}  # fmt: skip


def changed(**column: Any) -> dict[str, Any]:
    first, *others = GOOD["all"]["columns"]
    return GOOD | {"all": {"columns": [first | column, *others]}}


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "cannot be read: No such file or directory; write it with lit-fed statistics"),
        ("", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"a": NaN}', "is not JSON (NaN is not a number)"),
        ("[]", "holds no statistics; name a file that lit-fed statistics wrote"),
        ({}, "holds no statistics"),
        (GOOD | {"lit_fed_statistics": 2}, "has format 2, and this lit_fed reads 1; take statistics again"),
        (GOOD | {"lit_fed_statistics": True}, "holds no statistics"),
        ({key: GOOD[key] for key in ("lit_fed_statistics", "privacy")}, "is damaged (it lacks 'all')"),
        (GOOD | {"all": []}, "is damaged"),
        (GOOD | {"all": {"columns": {}}}, "is damaged (it has no inputs, or two of one name)"),
        (GOOD | {"all": {"columns": [3]}}, "is damaged"),
        (GOOD | {"privacy": 3}, "is damaged (its privacy is malformed)"),
        (changed(name="b"), "is damaged (it has no inputs, or two of one name)"),
        (changed(name=3), "is damaged (3 is not a column's name)"),
        (changed(variance=-1.0), "is damaged (the mean and variance of 'a' are 1.0 and -1.0)"),
        (changed(mean="1"), "is damaged (the mean and variance of 'a' are '1' and 4.0)"),
        (changed(mean=True), "is damaged (the mean and variance of 'a' are True and 4.0)"),
        (changed(variance=None), "is damaged (the mean and variance of 'a' are 1.0 and None)"),
        (changed(mean=None, variance=None), "withholds the mean of 'a'; take statistics again with a smaller --least"),
        (changed(name="c"), "has no column 'a', but c, b; take statistics of these data"),
    ],
)
def test_a_file_that_cannot_be_used_ends_in_one_line(tmp_path: Path, content: Any, line: str) -> None:
    file = tmp_path / "s.json"
    if content is not None:
        file.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ConfigError) as error:
        rows(write_rows(tmp_path), normalize=str(file)).setup()
    assert str(error.value).startswith(f"data.normalize {file} ")
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_settings_that_contradict_it(tmp_path: Path) -> None:
    (tmp_path / "s.json").write_text(json.dumps(GOOD))
    path, file = write_rows(tmp_path), str(tmp_path / "s.json")
    with pytest.raises(ConfigError, match=r"data\.normalize and data\.mean exclude each other; leave one out"):
        rows(path, normalize=file, mean=[0.0, 0.0], std=[1.0, 1.0])
    with pytest.raises(ConfigError, match=r"data\.standardise is False, and data\.normalize is given"):
        rows(path, normalize=file, standardise=False)
    with pytest.raises(ConfigError, match="has 2 channels, and inputs have 1; take statistics of these data"):
        Digits(normalize=file).preprocessing()
    with pytest.raises(ConfigError, match="has 2 channels, and inputs have 3"):
        ClientFolders(root=str(tmp_path), normalize=file)


def test_a_private_run_takes_noisy_figures_only(tmp_path: Path) -> None:
    """Exact figures of all clients would reach every client past the accountant."""
    pytest.importorskip("dp_accounting")
    path, ranges = write_rows(tmp_path), {"a": [0, 100], "b": [-10, 10]}
    exact = statistics_of(rows(path), tmp_path / "exact.json")
    noisy = statistics_of(rows(path), tmp_path / "noisy.json", Noise.from_privacy(SampleLevel(1.0, 0.1)), ranges)
    flat = json.loads(Path(noisy).read_text())
    flat["all"]["columns"][0]["variance"] = 0.0
    (tmp_path / "flat.json").write_text(json.dumps(flat))
    with pytest.raises(ConfigError, match="has a variance of 0 for 'a', which the noise exceeds"):
        rows(path, normalize=str(tmp_path / "flat.json")).setup()
    settings: Any = {"class_names": ["n", "y"]}
    assert "holds exact figures of all clients" in str(rows(path, normalize=exact, **settings).pooled())
    assert rows(path, normalize=noisy, **settings).pooled() is None
    digits = statistics_of(Digits(), tmp_path / "digits.json")
    assert "holds exact figures" in str(Digits(normalize=digits).pooled())
    arrays = ClientArrays(2, [1, 8, 8], 10, max_value=16, normalize=digits)
    assert "holds exact figures" in str(arrays.pooled())
    folders = ClientFolders(str(tmp_path), class_names=["x", "y"], grayscale=True, normalize=digits)
    assert "holds exact figures" in str(folders.pooled())


def test_ends_agree_on_the_figures_and_not_on_the_files_place(tmp_path: Path) -> None:
    here, there, other = (tmp_path / name for name in ("here.json", "there.json", "other.json"))
    for path in (here, there):
        path.write_text(json.dumps(GOOD))
    other.write_text(json.dumps(changed(mean=1.5)))
    settings = [
        agreed(f"data: {{class_path: Table, init_args: {{normalize: {path}}}}}") for path in (here, there, other)
    ]
    assert difference(settings[0], settings[1]) is None
    assert str(difference(settings[0], settings[2])).startswith("data.init_args.normalize is ")
    assert fingerprint(str(here)) == fingerprint(str(there))
