"""A frozen base of a gigabyte below adapters in a federation: the bytes, seconds and memory of both ends.

A server and a node with two clients train two rounds over gRPC on this machine, each in a process of its own: once with
a base that both ends read from one file (sparse, so that it needs no disk), and once with a base that the node lacks,
because each end draws its own. Seconds count from the start of the processes. The bars: a base from a file never
travels and is in no file that an end writes; the other travels once.

    python benchmarks/large_base.py [--layers 4]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path

import machine  # beside this file, as the next
import torch
from federation import command, environment, free_port
from lightning import LightningModule
from torch import Tensor, nn

from lit_fed.data import Arrays, Natural, TensorDataModule
from lit_fed.networks import Adapter, adapt_network, load_weights

WIDE = 8192  # of a layer: 256 MiB
NAME = "large_base"  # this module's, for the ends


class Deep(LightningModule):
    """Square layers, each with an adapter of rank 4.

    Args:
        layers: Their number.
        file: Holds them; null for random ones that differ between processes.
    """

    def __init__(self, layers: int, file: str | None = None) -> None:
        super().__init__()
        self.network = nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(layers)))
        if file is not None:
            load_weights(self.network, file)
        else:
            for place, layer in enumerate(self.network):
                nn.init.constant_(layer.weight, (os.getpid() + place) * 1e-9)  # type: ignore[arg-type]  # a tensor
        adapt_network(self.network, None, Adapter(rank=4, train=[]))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The mean square of the outputs."""
        outputs: Tensor = self.network(batch[0])
        return (outputs - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Gradient descent."""
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=1e-3)


class Rows(TensorDataModule):
    """Four rows of ones for each of two clients."""

    num_classes = 2
    input_shape = (WIDE,)

    def __init__(self) -> None:
        super().__init__(num_clients=2, partition=Natural(), batch_size=4)

    def load_arrays(self) -> Arrays:
        """The same to train and to test."""
        x, y = torch.ones(8, WIDE).numpy(), torch.zeros(8, dtype=torch.int64).numpy()
        clients = torch.arange(8).floor_divide(4).numpy()
        return Arrays(x, y, x, y, clients, clients, "ones")


def sparse_file(path: Path, layers: int) -> None:
    """A safetensors file of zeros of which the header alone is on the disk."""
    size = 4 * WIDE * WIDE
    entries = {
        f"{place}.weight": {"dtype": "F32", "shape": [WIDE, WIDE], "data_offsets": [place * size, (place + 1) * size]}
        for place in range(layers)
    }
    header = json.dumps(entries).encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + layers * size)


def federate(folder: Path, layers: int, file: Path | None) -> dict[str, float]:
    """Seconds, the peak memory of both ends, the bytes between them, and those of their files."""
    address = f"127.0.0.1:{free_port()}"
    config = {
        "trainer": {"max_rounds": 2, "accelerator": "cpu", "evaluate_every": 0, "enable_progress_bar": False},
        "data": {"class_path": f"{NAME}.Rows"},
        "algorithm": {"class_path": "FedAvg"},
        "model": {"class_path": f"{NAME}.Deep", "init_args": {"layers": layers, "file": file and str(file)}},
    }
    (folder / "run.yaml").write_text(json.dumps(config))  # JSON is YAML
    to = ["-c", str(folder / "run.yaml"), "--server", address]
    words = {
        "node": ["node", *to, "--client", "[0,1]", "--state_dir", str(folder / "node")],
        "server": ["federate", *to, "--trainer.default_root_dir", str(folder / "server")],
    }
    paths = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
    around = environment() | {"PYTHONPATH": os.pathsep.join(paths)}
    before, begun = loopback_bytes(), time.monotonic()
    ends = {}
    for name, line in words.items():
        with open(folder / f"{name}.log", "wb") as log:
            ends[name] = subprocess.Popen(command(*line), stdout=log, stderr=log, env=around)
    peaks = dict.fromkeys(ends, 0.0)
    while ends["server"].poll() is None:
        for name, process in ends.items():
            peaks[name] = max(peaks[name], peak_of(process.pid))
        time.sleep(0.05)
    took = time.monotonic() - begun
    ends["node"].terminate()
    ends["node"].wait(60)
    if ends["server"].returncode:
        raise SystemExit((folder / "server.log").read_text()[-3000:] + (folder / "node.log").read_text()[-3000:])
    kept = {name: sum(path.stat().st_size for path in (folder / name).rglob("*") if path.is_file()) for name in ends}
    return {
        "seconds": took,
        "sent": loopback_bytes() - before,
        **{f"{name}, peak": peak for name, peak in peaks.items()},
        **{f"{name}, files": float(size) for name, size in kept.items()},
    }


def peak_of(process: int) -> float:
    """The peak memory of a process so far, bytes; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    return next((1024 * float(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0.0)


def loopback_bytes() -> float:
    """Bytes that have crossed the loopback device, those of other programs among them."""
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    return next(float(line.split()[1]) for line in lines if line.lstrip().startswith("lo:"))


def main() -> None:
    """Both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="of 256 MiB")
    layers = parser.parse_args().layers
    base, missed = 4.0 * WIDE * WIDE * layers, []
    print(f"base {base / 2**20:,.0f} MiB; all in bases but the seconds")
    for way in ("from a file", "of the server"):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            file = folder / "base.safetensors" if way == "from a file" else None
            if file is not None:
                sparse_file(file, layers)
            found = federate(folder, layers, file)
        told = [f"{key} {value / (1 if key == 'seconds' else base):.2f}" for key, value in found.items()]
        print(f"{way}: {', '.join(told)}", flush=True)
        travels = 0 if file is not None else 1
        if not travels <= found["sent"] / base < travels + 0.2:
            missed.append(f"{way}, the base travels {found['sent'] / base:.2f} times")
        if file is not None and max(found["server, files"], found["node, files"]) > 0.1 * base:
            missed.append(f"{way}, an end keeps it")
    print(machine.line())
    if missed:
        raise SystemExit(f"missed: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
