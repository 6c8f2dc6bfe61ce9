"""``lit-fed split``: write a data set as one folder per client, for nodes of a federation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from lit_fed.command.commands.deployed import add_run, make
from lit_fed.command.table import Call
from lit_fed.data.formats.split import settings_of, write_folders
from lit_fed.engine.storage.files import files_in_place
from lit_fed.errors import CheckpointError, ConfigError

_OF_CLIENT = """# Client {client}

`data.npz` holds only this client's samples. On its machine, in the folder that holds this one{public}:

    lit-fed node -c client_{client}/config.yaml --client {client} --superlink ADDRESS --state_dir node_{client} \\
      --ca ca.crt --key node.key

`lit-fed provision` makes `ca.crt` and `node.key`. Where all ends are on one machine, both options may be left out.
"""
_OF_SERVER = """# The server

`data.npz` holds the shared test set; without it only clients' metrics are reported. In the folder that holds this
one{public}:

    lit-fed federate -c server/config.yaml --superlink ADDRESS \\
      --ca ca.crt --certificate server.crt --key server.key --node_keys node_keys.yaml

`lit-fed provision` makes these files. Where all ends are on one machine, the four options may be left out.
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of a run, and the folder to write to."""
    add_run(parser)
    parser.add_argument(
        "--output", type=str, required=True, help="new folder, for one folder per client and the server's"
    )


def run(call: Call) -> int:
    """Divide the data, and write the folders."""
    output = Path(call.settings.output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"--output {output} exists already; name a new folder")
    trainer, parts = make(call, ("output",))
    data = parts.data
    data.reserve(parts.algorithm.public_size, parts.algorithm.calibration_fraction)
    data.prepare_data()
    data.setup("fit")
    settings = settings_of(data)
    content = yaml.safe_load(trainer.settings.config)
    content["data"] = {"class_path": "ClientArrays", "init_args": {**settings, "root": "."}}
    try:
        with files_in_place(output, ()) as temporary:
            write_folders(data, temporary)
            _write_texts(temporary, content, data.num_clients, data.has_public)
    except CheckpointError as error:
        raise ConfigError(f"{error}; change --output") from error
    print(
        f"wrote {data.num_clients} clients and the server's test set to {output}; each README.md says how to start it"
    )
    return 0


def _write_texts(output: Path, content: dict[str, Any], num_clients: int, has_public: bool) -> None:
    """Write the configuration, the same for all, and how to start each end."""
    public = ", with `public` beside it" if has_public else ""
    texts = {f"client_{one}": _OF_CLIENT.format(client=one, public=public) for one in range(num_clients)}
    texts["server"] = _OF_SERVER.format(public=public)
    for name, text in texts.items():
        (output / name / "README.md").write_text(text, encoding="utf-8")
        (output / name / "config.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
