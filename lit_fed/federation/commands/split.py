"""``lit-fed split``: write a data set as one folder per client, for nodes of a federation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from lit_fed.command.command import Call
from lit_fed.data import FederatedDataModule
from lit_fed.data.formats.folders import FolderForm, folder_form
from lit_fed.engine.storage.files import files_in_place
from lit_fed.errors import CheckpointError, ConfigError
from lit_fed.federation.commands.deployed import add_run, make
from lit_fed.federation.ends import keep_private

_README = """# {num_clients} clients and the server

{holds} the samples of one client in each `client_` folder, and in `server` the shared test set, without which only
clients' metrics are reported. Between machines, `lit-fed provision` makes a folder for each end, whose `README.md` says
how to start it; copy each folder of data, as it is, into the folder of its end{public}.

To try it out on one machine, without keys, start all ends here:

    lit-fed federate -c server/config.yaml --server 127.0.0.1:9092
    lit-fed node -c client_0/config.yaml --client {name} --server 127.0.0.1:9092 --state_dir node_0

and so on to `client_{last}`.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of a run, and the folder to write to."""
    add_run(parser)
    parser.add_argument(
        "--output", type=str, required=True, help="new folder, for one folder per client and the server's"
    )


def run(call: Call) -> int:
    """Divide the data, and write the folders, readable for the user alone."""
    keep_private()
    output = Path(call.settings.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output} exists already; name a new folder")
    trainer, parts = make(call)
    data = parts.data
    data.reserve(parts.algorithm.public_size, parts.algorithm.calibration_fraction)
    data.prepare_data()
    data.setup("fit")
    if call.settings.trainer.privacy is not None and (why := data.pooled()) is not None:
        raise ConfigError(f"trainer.privacy: {why}")  # the nodes would find it among their settings, as if it was given
    form = folder_form(data)
    content = yaml.safe_load(trainer.settings.config)
    content["data"] = {"class_path": form.name, "init_args": {**form.settings_of(data), "root": "."}}
    try:
        with files_in_place(output, ()) as temporary:
            form.write(data, temporary)
            _write_texts(temporary, content, data, form)
    except CheckpointError as error:
        raise ConfigError(f"{error}; change --output") from error
    print(
        f"wrote {data.num_clients} clients and the server's test set to {output}; its README.md says how to start them"
    )
    return 0


def _write_texts(output: Path, content: dict[str, Any], data: FederatedDataModule, form: FolderForm) -> None:
    """Write the configuration, the same for all, and how to start the ends."""
    public, last = ", with `public` beside it" if data.has_public else "", data.num_clients - 1
    words = {"holds": form.holds, "name": form.client.format(0), "public": public, "last": last}
    (output / "README.md").write_text(_README.format(num_clients=data.num_clients, **words), encoding="utf-8")
    for name in ("server", *(f"client_{client_id}" for client_id in range(data.num_clients))):
        (output / name / "config.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
