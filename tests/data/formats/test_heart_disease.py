"""FLamby's Heart Disease against pandas, in generated files of the published form."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from lit_fed.data import HeartDisease
from lit_fed.data.formats.heart_disease import CENTRES, FEATURES
from lit_fed.errors import ConfigError

pd = pytest.importorskip("pandas")


def write(root: Path, rows: int = 30) -> Path:
    rng = np.random.default_rng(0)
    for centre in CENTRES:
        lines = []
        for row in range(rows):
            cells = [rng.integers(30, 80), rng.integers(2), 1 + row % 4, rng.integers(90, 200), rng.integers(100, 400),
                     rng.integers(2), row % 3, rng.integers(60, 200), rng.integers(2), round(rng.normal(), 1),
                     "?", "?", "?", row % 5]  # fmt: skip
            if row % 7 == 3:
                cells[rng.integers(10)] = "?"
            lines.append(",".join(map(str, cells)))
        (root / f"processed.{centre}.data").write_text("\n".join(lines) + "\n")
    return root


def by_pandas(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """As FLamby's dataset.py reads a file: drop columns, then rows; dummies; any diagnosis above 0."""
    frame = pd.read_csv(path, header=None).replace("?", np.nan).drop([10, 11, 12], axis=1).dropna(axis=0)
    frame = frame.apply(pd.to_numeric)
    x = pd.get_dummies(frame.iloc[:, :-1], columns=[2, 6], drop_first=True)
    return x.to_numpy(dtype=np.float64), (frame.iloc[:, -1] > 0).to_numpy(dtype=np.int64)


def test_hospitals_hold_the_patients_of_pandas(tmp_path: Path) -> None:
    data = HeartDisease(root=str(write(tmp_path)), test_fraction=0.2, mean=[0.0] * 13, std=[1.0] * 13)
    assert (data.num_classes, data.input_shape, data.client_names) == (2, (13,), list(CENTRES))
    assert len(FEATURES) == 13
    data.setup()
    for client, centre in enumerate(CENTRES):
        x, y = by_pandas(tmp_path / f"processed.{centre}.data")
        parts = [data.train_loader(client, torch.Generator()), data.test_loader(client)]
        pairs = [batch for loader in parts for batch in loader]
        rows = torch.cat([torch.cat([a, b[:, None].float()], dim=1) for a, b in pairs]).tolist()
        wanted = np.concatenate([x, y[:, None]], axis=1).astype(np.float32).tolist()
        assert sorted(rows) == sorted(wanted)
        assert parts[1].num_samples == len(y) // 5


def test_left_out_patients_are_counted_and_features_standardised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = HeartDisease(root=str(write(tmp_path)))
    data.setup()
    assert capsys.readouterr().out.count("left out 4 patients of 30 with missing cells") == 4
    x = torch.cat([batch for batch, _ in data.train_dataloader()])
    assert torch.allclose(x.mean(dim=0), torch.zeros(13), atol=1e-5)
    assert torch.allclose(x.std(dim=0, correction=0), torch.ones(13), atol=1e-5)
    assert "data.standardise takes mean and deviation over all" in str(data.pooled())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("1,2,3", "line 1 has 3 cells; it must have 14"),
        ("50,1,4,130,200,0,1,120,0,much,?,?,?,0", "could not convert string to float: 'much'; write numbers, or ?"),
        ("50,1,5,130,200,0,1,120,0,1.0,?,?,?,0", "line 1: cp is 5; it must be 1, 2, 3, 4"),
        ("50,1,4,130,200,0,1,nan,0,1.0,?,?,?,0", "thalach is empty, not a finite number of 32 bits"),
        ("50,1,4,130,200,0,?,120,0,1.0,?,?,?,0", "has no patient without missing cells; fetch it anew"),
    ],
)
def test_malformed_rows_are_named(line: str, message: str, tmp_path: Path) -> None:
    (write(tmp_path) / "processed.va.data").write_text(line + "\n")
    with pytest.raises(ConfigError, match=re.escape(message)):
        HeartDisease(root=str(tmp_path)).setup()


def test_a_missing_hospital_is_named(tmp_path: Path) -> None:
    (write(tmp_path) / "processed.hungarian.data").unlink()
    with pytest.raises(ConfigError, match=r"processed\.hungarian\.data does not exist; set data\.root to the folder"):
        HeartDisease(root=str(tmp_path)).setup()
