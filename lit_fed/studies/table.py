"""Commands of studies."""

from __future__ import annotations

from lit_fed.command.command import Command

COMMANDS = {
    "study": Command(
        "Run a grid of runs, and print a paper's table beside ours.", "lit_fed.studies.run_studies", own_files=True
    ),
    "results": Command(
        "Write the claims of all studies that have run on one page.", "lit_fed.studies.run_results", own_files=True
    ),
    "simulate": Command("Draw a paper's figure from simulations.", "lit_fed.studies.simulations.run_simulation"),
    "schema": Command(
        "Print a JSON schema of configuration files, for editors.",
        "lit_fed.studies.print_schema",
        own_files=True,
        light=True,
    ),
}
