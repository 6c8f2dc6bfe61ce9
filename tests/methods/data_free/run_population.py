"""Runs HFedCKD with 500 clients of three widths and prints the most memory it had: ``run_population.py FOLDER``."""

import sys
from pathlib import Path

from tests.methods.data_free.run_kinds import CONFIGS

NUM_CLIENTS = 500
OPTIONS = {
    "trainer.max_rounds": "2",
    "trainer.local_epochs": "1",
    "trainer.evaluate_every": "0",
    "trainer.logger": "false",
    "trainer.enable_progress_bar": "false",
    "trainer.client_store": "disk",
    "trainer.participation.init_args.count": str(NUM_CLIENTS),
    "data.init_args.num_clients": str(NUM_CLIENTS),
    "data.init_args.partition": "IID",
    "algorithm.init_args.generator_steps": "2",
    "algorithm.init_args.distillation_steps": "2",
}

if __name__ == "__main__":
    from lit_fed.command.cli import main

    words = [word for key, value in OPTIONS.items() for word in (f"--{key}", value)]
    run = Path(CONFIGS) / "papers" / "hfedckd" / "runs" / "digits_three_widths.yaml"
    main(["fit", "-c", str(run), *words, "--trainer.default_root_dir", sys.argv[1]])
    # Not ru_maxrss, which begins with what the process that started this one had.
    [peak] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    print("peak", int(peak.split()[1]) * 1024)
