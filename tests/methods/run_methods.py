"""Runs configurations of methods, one after the other in one process: ``run_methods.py FOLDER ROUNDS DEVICES NAME …``.

Started by torchrun, the processes share each run. Interrupted runs in the folder are continued.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

CONFIGS = Path(__file__).parents[2] / "configs"
METHODS = {path.stem: path for path in sorted((CONFIGS / "method").glob("*.yaml"))}
METHODS["scaffold_with_raf"] = METHODS["scaffold"]
METHODS["fedavg_with_adapters"] = METHODS["fedavg"]
ON_ADAPTERS = ["fedavg_with_adapters", "fedex_lora", "fedit", "fedsa_lora", "ffa_lora", "flora", "hetlora"]
ASYNCHRONOUS = {f"{name}_asynchronous": name for name in METHODS}
SMALL = {
    "trainer.participation.init_args.count": "4",
    "trainer.evaluate_every": "2",
    "trainer.protocols": "[GlobalTest, ClientTest]",
    "trainer.logger": "false",
    "trainer.enable_progress_bar": "false",
    "trainer.local_epochs": "1",
    "data.init_args.num_clients": "8",
    "data.init_args.seed": "0",  # no client has a last batch of one
    "data.init_args.max_train_samples": "320",
    "data.init_args.partition.init_args.alpha": "1.0",
    "model.init_args.network": "mlp",
}
# Methods for poses: the same on drawn figures, at two resolutions.
PUPPETS = CONFIGS / "papers" / "raf" / "runs" / "puppets.yaml"
ON_PUPPETS = {"raf", "scaffold_with_raf"}
SMALL_PUPPETS = {
    **{key: value for key, value in SMALL.items() if key.startswith("trainer.") and "count" not in key},
    "trainer.participation": "UniformParticipation",
    "trainer.participation.count": "4",
    "data.init_args.clients_per_level": "null",
    "data.init_args.num_clients": "8",
    "data.init_args.resolutions": "[[32, 24], [24, 16]]",
    "data.init_args.test_resolutions": "[[24, 16], [40, 32]]",
    "data.init_args.samples_per_client": "12",
    "data.init_args.test_samples": "16",
    "model.init_args.network": "pose_vit_tiny",
    "model.init_args.network_args": "{depth: 1, embed_dim: 16, drop_path: 0.5}",
}
# What a method cannot do without: its own network or learning rate, and here a warm-up that ends before the last round.
FILES = {
    "fedfrozen": "network/vit_pocket.yaml",
    **dict.fromkeys(ON_ADAPTERS, "network/lora.yaml"),
    **{
        name: f"papers/feddr_plus/tuned/quickstart_{name}.yaml"
        for name in ("dot_regression", "feddr_plus", "fedetf", "spherefed")
    },
}
# Of `ASYNCHRONOUS`: six of the eight clients in flight, a step on every second arrival.
IN_FLIGHT: dict[str, str | None] = {
    "trainer.participation.init_args.count": None,
    "trainer.participation.count": None,
    "trainer.participation": "Asynchronous",
    "trainer.participation.concurrency": "6",
    "trainer.participation.buffer": "2",
    "trainer.participation.speeds.sigma": "1.0",
}
KEEPING = {
    "trainer.client_optimizer": "kept",
    "model.init_args.optimizer": "torch.optim.Adam",
    "model.init_args.optimizer.lr": "0.003",
}
# Settings beside a method's file: clients keep their optimizer, of which Ditto has two; IFCA sends single models.
VARIANTS = {
    "fedavg_kept": ("fedavg", KEEPING),
    "ditto_kept": ("ditto", KEEPING),
    "ifca_probing": ("ifca", {"algorithm.init_args.probe_every": "2"}),
}
OWN: dict[str, dict[str, str | None]] = {
    "fedbn": {"model.init_args.network": "test_resnet"},
    "fedfrozen": {
        "model.init_args.network": None,
        "algorithm.init_args.warmup_rounds": "2",
        "model.init_args.optimizer": "torch.optim.AdamW",
        "model.init_args.optimizer.lr": "0.003",
        "trainer.local_epochs": "8",
    },
    "pfedhn": {"algorithm.init_args.server_lr": "0.3"},  # the file's is for thousands of rounds
    "scaffold_with_raf": {
        "algorithm.init_args.regularizer": "RAF",
        "model.init_args.optimizer": "torch.optim.SGD",
        "model.init_args.optimizer.lr": "0.1",
    },
}


def words_of(name: str, root: Path, rounds: int, devices: int = 1) -> list[str]:
    """Options that run a method for some rounds on eight clients, four a round, mostly of the digits."""
    name, in_flight = (ASYNCHRONOUS[name], IN_FLIGHT) if name in ASYNCHRONOUS else (name, {})
    name, varied = VARIANTS.get(name, (name, {}))
    start, small = (PUPPETS, SMALL_PUPPETS) if name in ON_PUPPETS else (CONFIGS / "quickstart.yaml", SMALL)
    options = small | OWN.get(name, {}) | in_flight | varied
    options |= {"trainer.max_rounds": str(rounds), "trainer.devices": str(devices)}
    options["model.init_args.lr_scheduler.init_args.T_max"] = "4"  # and not all rounds, for a run that is to go on
    words = [word for key, value in options.items() if value is not None for word in (f"--{key}", value)]
    paths = [start, METHODS[name], *([CONFIGS / FILES[name]] if name in FILES else [])]
    files = [word for path in paths for word in ("-c", str(path))]
    return [*files, *words, "--trainer.default_root_dir", str(root)]


def run_method(name: str, folder: Path, rounds: int, devices: int = 1, more: Sequence[str] = ()) -> Path:
    """Run a method for some rounds in one process, with more options; returns the run's folder."""
    from lit_fed.command.cli import main

    root = folder / name
    main(["fit", *words_of(name, root, rounds, devices), *more, "--ckpt_path", "last"])
    return root / "lightning_logs" / "version_0"


if __name__ == "__main__":
    for method in sys.argv[4:]:
        run_method(method, Path(sys.argv[1]), rounds=int(sys.argv[2]), devices=int(sys.argv[3]))
