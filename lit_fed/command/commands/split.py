"""``lit-fed split``: write a data set as one folder per client, for nodes of a federation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jsonargparse import ArgumentParser

from lit_fed.command.commands.deployed import add_run, make
from lit_fed.command.table import Call
from lit_fed.data import FederatedDataModule, PoseDataModule
from lit_fed.data.formats.split import settings_of, write_folders
from lit_fed.data.pose import pose_settings_of, write_pose_folders
from lit_fed.deployment.ends import keep_private
from lit_fed.engine.storage.files import files_in_place
from lit_fed.errors import CheckpointError, ConfigError

_OF_CLIENT = """# Client {client}

{holds} only this client's samples. On its machine, in the folder that holds this one{public}:

    lit-fed node -c client_{client}/config.yaml --client {name} --server ADDRESS --state_dir node_{client} \\
      --ca ca.crt --certificate node.crt --key node.key

`lit-fed provision` makes these files. Where all ends are on one machine, the three options may be left out.
"""
_OF_SERVER = """# The server

{holds} the shared test set; without it only clients' metrics are reported. In the folder that holds this
one{public}:

    lit-fed federate -c server/config.yaml --server ADDRESS \\
      --ca ca.crt --certificate server.crt --key server.key --node_keys node_keys.yaml

`lit-fed provision` makes these files. Where all ends are on one machine, the four options may be left out.
"""


class _Form(NamedTuple):
    """The folders of a kind of data.

    Args:
        name: The data module that reads them.
        settings_of: Its settings.
        write: Writes the folders.
        holds: The data in a folder, for a reader.
        client: A client's name, by its position.
    """

    name: str
    settings_of: Callable[[Any], dict[str, Any]]
    write: Callable[[Any, Path], None]
    holds: str
    client: str


_ARRAYS = _Form("ClientArrays", settings_of, write_folders, "`data.npz` holds", "{}")
_POSES = _Form("ClientPoses", pose_settings_of, write_pose_folders, "`images` and the `.json` files hold", "client_{}")


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
    trainer, parts = make(call, ("output",))
    data = parts.data
    data.reserve(parts.algorithm.public_size, parts.algorithm.calibration_fraction)
    data.prepare_data()
    data.setup("fit")
    form = _POSES if isinstance(data, PoseDataModule) else _ARRAYS
    content = yaml.safe_load(trainer.settings.config)
    content["data"] = {"class_path": form.name, "init_args": {**form.settings_of(data), "root": "."}}
    try:
        with files_in_place(output, ()) as temporary:
            form.write(data, temporary)
            _write_texts(temporary, content, data, form)
    except CheckpointError as error:
        raise ConfigError(f"{error}; change --output") from error
    print(
        f"wrote {data.num_clients} clients and the server's test set to {output}; each README.md says how to start it"
    )
    return 0


def _write_texts(output: Path, content: dict[str, Any], data: FederatedDataModule, form: _Form) -> None:
    """Write the configuration, the same for all, and how to start each end."""
    words = {"public": ", with `public` beside it" if data.has_public else "", "holds": form.holds}
    texts = {
        f"client_{one}": _OF_CLIENT.format(client=one, name=form.client.format(one), **words)
        for one in range(data.num_clients)
    }
    texts["server"] = _OF_SERVER.format(**words)
    for name, text in texts.items():
        (output / name / "README.md").write_text(text, encoding="utf-8")
        (output / name / "config.yaml").write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
