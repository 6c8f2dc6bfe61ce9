"""Runs configurations of methods, one after the other in one process: ``run_methods.py FOLDER ROUNDS DEVICES NAME …``.

Started by torchrun, the processes share each run. Interrupted runs in the folder are continued.
"""

import sys
from pathlib import Path

CONFIGS = Path(__file__).parents[2] / "configs"
METHODS = {path.stem: path for path in sorted((CONFIGS / "method").glob("*.yaml"))}
SMALL = {
    "trainer.participation.init_args.count": "4",
    "trainer.evaluate_every": "2",
    "trainer.protocols": "[GlobalTest, ClientTest]",
    "trainer.logger": "false",
    "trainer.enable_progress_bar": "false",
    "trainer.local_epochs": "1",
    "data.init_args.num_clients": "8",
    "data.init_args.max_train_samples": "320",
    "data.init_args.partition.init_args.alpha": "1.0",
    "model.init_args.network": "mlp",
}
# What a method cannot do without: its own network or learning rate, and here a warm-up that ends before the last round.
FILES = {
    "fedfrozen": "network/vit_pocket.yaml",
    **{
        name: f"papers/feddr_plus/tuned/quickstart_{name}.yaml"
        for name in ("dot_regression", "feddr_plus", "fedetf", "spherefed")
    },
}
OWN: dict[str, dict[str, str | None]] = {
    "fedfrozen": {
        "model.init_args.network": None,
        "algorithm.init_args.warmup_rounds": "2",
        "model.init_args.optimizer": "torch.optim.AdamW",
        "model.init_args.optimizer.lr": "0.003",
        "trainer.local_epochs": "8",
    },
}


def run_method(name: str, folder: Path, rounds: int, devices: int = 1) -> Path:
    """Run a method for some rounds on eight clients of the digits, four a round; returns the run's folder."""
    from lit_fed.command.cli import main

    root = folder / name
    options = SMALL | OWN.get(name, {}) | {"trainer.max_rounds": str(rounds), "trainer.devices": str(devices)}
    words = [word for key, value in options.items() if value is not None for word in (f"--{key}", value)]
    paths = [CONFIGS / "quickstart.yaml", METHODS[name], *([CONFIGS / FILES[name]] if name in FILES else [])]
    files = [word for path in paths for word in ("-c", str(path))]
    main(["fit", *files, *words, "--trainer.default_root_dir", str(root), "--ckpt_path", "last"])
    return root / "lightning_logs" / "version_0"


if __name__ == "__main__":
    for method in sys.argv[4:]:
        run_method(method, Path(sys.argv[1]), rounds=int(sys.argv[2]), devices=int(sys.argv[3]))
