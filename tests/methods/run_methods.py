"""Runs every method's configuration, one after the other in one process: ``run_methods.py FOLDER ROUNDS DEVICES``.

Started by torchrun, the processes share each run. Interrupted runs in the folder are continued.
"""

import sys
from pathlib import Path

CONFIGS = Path(__file__).parents[2] / "configs"
METHODS = sorted((CONFIGS / "method").glob("*.yaml"))
SMALL = {
    "trainer.participation.init_args.count": "4",
    "trainer.evaluate_every": "2",
    "trainer.protocols": "[GlobalTest, ClientTest]",
    "trainer.logger": "false",
    "trainer.enable_progress_bar": "false",
    "data.init_args.num_clients": "8",
    "data.init_args.max_train_samples": "320",
    "data.init_args.partition.init_args.alpha": "1.0",
    "model.init_args.network": "mlp",
    "model.init_args.local_epochs": "1",
}
# What a method cannot do without: its own network, and here a warm-up that ends before the last round.
OWN: dict[str, dict[str, str | None]] = {
    "fedfrozen": {
        "model.init_args.network": None,
        "model.init_args.warmup_rounds": "2",
        "model.init_args.optimizer": "torch.optim.AdamW",
        "model.init_args.optimizer.lr": "0.003",
        "model.init_args.local_epochs": "8",
    },
}


def run_method(method: Path, folder: Path, rounds: int, devices: int = 1) -> Path:
    """Run a method for some rounds on eight clients of the digits, four a round; returns the run's folder."""
    from lit_fed.command.cli import main

    root = folder / method.stem
    options = SMALL | OWN.get(method.stem, {}) | {"trainer.max_rounds": str(rounds), "trainer.devices": str(devices)}
    words = [word for key, value in options.items() if value is not None for word in (f"--{key}", value)]
    files = ["-c", str(CONFIGS / "quickstart.yaml"), "-c", str(method)]
    main(["fit", *files, *words, "--trainer.default_root_dir", str(root), "--ckpt_path", "last"])
    return root / "lightning_logs" / "version_0"


if __name__ == "__main__":
    for path in METHODS:
        run_method(path, Path(sys.argv[1]), rounds=int(sys.argv[2]), devices=int(sys.argv[3]))
