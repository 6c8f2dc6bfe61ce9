"""Runs methods on three kinds of network, one after the other: ``run_kinds.py FOLDER ROUNDS DEVICES NAME …``.

Started by torchrun, the processes share each run. Interrupted runs in the folder are continued.
"""

import sys
from pathlib import Path

CONFIGS = Path(__file__).parents[3] / "configs"
GENERATORS = [f"{method}_{kinds}" for method in ("hfedckd", "fedgen") for kinds in ("widths", "architectures")]
PROTOTYPES = ["fedproto_architectures", "fedtgp_architectures"]
METHODS = [*GENERATORS, *PROTOTYPES]
SMALL = {
    "trainer.local_epochs": "1",
    "trainer.evaluate_every": "2",
    "trainer.logger": "false",
    "trainer.enable_progress_bar": "false",
    "trainer.participation.init_args.count": "4",
    "data.init_args.num_clients": "9",
    "data.init_args.max_train_samples": "360",
}


def run_kinds(name: str, folder: Path, rounds: int, devices: int = 1) -> Path:
    """Run a method for some rounds on nine clients of three kinds, four a round; returns the run's folder."""
    from lit_fed.command.cli import main

    root = folder / name
    steps = {"algorithm.init_args.generator_steps": "4"} if name in GENERATORS else {}
    options = SMALL | steps | {"trainer.max_rounds": str(rounds), "trainer.devices": str(devices)}
    words = [word for key, value in options.items() for word in (f"--{key}", value)]
    method, _, kinds = name.partition("_")
    run = CONFIGS / "papers" / "hfedckd" / "runs" / f"digits_three_{kinds}.yaml"
    files = ["-c", str(run), *(["-c", str(CONFIGS / "method" / f"{method}.yaml")] if method != "hfedckd" else [])]
    main(["fit", *files, *words, "--trainer.default_root_dir", str(root), "--ckpt_path", "last"])
    return root / "lightning_logs" / "version_0"


if __name__ == "__main__":
    for method in sys.argv[4:]:
        run_kinds(method, Path(sys.argv[1]), rounds=int(sys.argv[2]), devices=int(sys.argv[3]))
