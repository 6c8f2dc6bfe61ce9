"""Random crops and flips of a whole batch at once, against a DataLoader that augments PIL images one by one.

Both give shuffled, normalised float32 batches of 32×32 images, padded by 4 and cropped, mirrored half of the time. They
take turns in one process, without worker processes; the median of the ratios of their CPU times counts.

    python benchmarks/data.py [--images 5000] [--output FOLDER]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import machine  # beside this file
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms as pil

from lit_fed.data.loaders.tensor_loader import TensorLoader
from lit_fed.data.loaders.transforms import Augmentation, Normalize, RandomCrop, RandomHorizontalFlip

DEMAND = 10.0  # times as fast
MEAN, STD, BATCH = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25), 50


class Pictures(Dataset[tuple[Tensor, int]]):
    """PIL images through torchvision's transforms, as its data sets give them.

    Args:
        pixels: Bytes, shape (n, side, side, 3), or (n, side, side) where they are grey.
    """

    def __init__(self, pixels: np.ndarray) -> None:
        self.pixels = pixels
        mean, std = (MEAN, STD) if pixels.ndim == 4 else (MEAN[:1], STD[:1])
        side = pixels.shape[1]
        steps = [pil.RandomCrop(side, padding=4), pil.RandomHorizontalFlip(), pil.ToTensor(), pil.Normalize(mean, std)]
        self.transform = pil.Compose(steps)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, position: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.pixels[position])), 0


def seconds(loader: Iterable[Any]) -> float:
    """CPU time of one pass over all batches."""
    started = time.process_time()
    for x, _ in loader:
        assert x.shape[1:] == (3, 32, 32)
        assert x.dtype == torch.float32
    return time.process_time() - started


def main() -> None:
    """Both loaders in turn; exits with status 1 where the batched one is not fast enough."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, help="also write data.json there")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    pixels = np.random.default_rng(0).integers(0, 256, (args.images, 32, 32, 3), dtype=np.uint8)
    batched = TensorLoader(
        torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(),
        torch.zeros(args.images, dtype=torch.int64),
        torch.arange(args.images),
        BATCH,
        torch.Generator().manual_seed(0),
        Augmentation([RandomCrop(4), RandomHorizontalFlip()]),
        Normalize(MEAN, STD),
    )
    one_by_one = DataLoader(Pictures(pixels), batch_size=BATCH, shuffle=True)
    seconds(batched)
    pairs = [(seconds(one_by_one), seconds(batched)) for _ in range(args.rounds)]
    rates = [args.images / statistics.median(column) for column in zip(*pairs, strict=True)]
    ratio = statistics.median(first / second for first, second in pairs)
    print("| PIL and DataLoader, images/s | batched, images/s | ratio | demand |\n|---|---|---|---|")
    print(f"| {rates[0]:,.0f} | {rates[1]:,.0f} | {ratio:.1f} | ≥ {DEMAND:g} |")
    print(machine.line())
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
        found = {"pil_images_s": rates[0], "batched_images_s": rates[1], "ratio": ratio}
        (args.output / "data.json").write_text(json.dumps(found, indent=1))
    if ratio < DEMAND:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
