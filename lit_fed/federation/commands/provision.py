"""``lit-fed provision``: certificates, keys and folders for the server and each site, from one small file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser

from lit_fed import __version__
from lit_fed.command.command import Call
from lit_fed.command.reading.words import CommandLine
from lit_fed.command.refusals.spelling import close, join_or
from lit_fed.engine.storage.files import remove_half_written
from lit_fed.errors import ConfigError
from lit_fed.federation.commands.deployed import add_run, make
from lit_fed.federation.commands.federation_file import SERVER, FederationFile, Site, check_everybody, read_federation
from lit_fed.parsing import Parser
from lit_fed.tracking import tracked

_FOLDERS = {"authority", SERVER, "sites", "operators"}

_PEERS = "peers.txt"
_OF_PEERS = (
    "# SHA-256 of the public keys that trainer.secure_sum sums with: ask the other sites for theirs, and compare\n"
)
_NODE_KEYS = "# Certificate of a site or an operator, below this file's folder: the clients that the site may serve.\n"

_OF_SITE = """# {name}: {clients} of {address}

Written by `lit-fed provision`: change the federation's file and run it again; do not edit files of this folder.

Copy this folder to the site's machine over a private connection: whoever has `node.key` can pose as {clients}. Then
delete `node.key` where it was made. Start it in the folder, with lit_fed {version} installed:

    {command}

As a service, with the folder at /srv/lit_fed/{name} and lit_fed in /srv/lit_fed/venv (`{unit}` names both):

{service}
"""
_OF_SERVER = """# The server: {address}

Written by `lit-fed provision`: change the federation's file and run it again; do not edit files of this folder.

Copy this folder to the server's machine over a private connection, and delete `server.key` where it was made. Open TCP
port {port}, and nothing else. Start it in the folder, with lit_fed {version} installed; after a crash the same
command goes on:

    {command}

As a service, with the folder at /srv/lit_fed/{name} and lit_fed in /srv/lit_fed/venv (`{unit}` names both):

{service}
"""
_OF_OPERATOR = """# {name}: operator of {address}

Written by `lit-fed provision`. Copy this folder to {name}'s machine over a private connection: whoever has
`operator.key` decides what the server runs. Then delete `operator.key` where it was made. In the folder:

    lit-fed submit study.yaml {options}
    lit-fed runs {options}
    lit-fed stop 0001-study {options}
"""
_SERVICE = """    id lit_fed || sudo useradd --system lit_fed
    sudo chown -R lit_fed /srv/lit_fed/{name}
    sudo cp {unit} /etc/systemd/system/
    sudo systemctl daemon-reload
    sudo systemctl enable --now {service}
    journalctl --follow --unit {service}"""
_UNIT = """[Unit]
Description=lit_fed: {what} of {address}
Wants=network-online.target
After=network-online.target

[Service]
User=lit_fed
WorkingDirectory=/srv/lit_fed/{name}
ExecStart=/srv/lit_fed/venv/bin/{command}
Restart=on-failure
RestartSec=30
Environment=HOME=/srv/lit_fed/{name}
UMask=0077
CapabilityBoundingSet=
NoNewPrivileges=true
PrivateTmp=true
ProtectControlGroups=true
ProtectHome=read-only
ProtectKernelTunables=true
ProtectSystem=strict
RestrictSUIDSGID=true
ReadWritePaths=/srv/lit_fed/{name}

[Install]
WantedBy=multi-user.target
"""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("-c", "--config", type=str, required=True, help="federation file: server, config and sites")
    parser.add_argument(
        "--output", type=str, required=True, help="folder for all ends: a new one, or one to bring up to date"
    )
    parser.add_argument(
        "--new_key",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help=f"replace the keys of these sites or operators, or of {SERVER}",
    )
    parser.add_argument(
        "--revoke",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="refuse the keys of these sites or operators",
    )


def run(call: Call) -> int:
    """Write missing files, and print which were kept."""
    settings = call.settings
    file = read_federation(Path(settings.config))
    for line in provision(file, Path(settings.output), settings.new_key, datetime.now(UTC), settings.revoke):
        print(line)
    return 0


def provision(
    file: FederationFile, output: Path, anew: Sequence[str], now: datetime, revoked: Sequence[str] = ()
) -> list[str]:
    """Update a folder of all ends.

    Args:
        file: Description of the federation.
        output: The folder.
        anew: Sites and operators whose keys are replaced; the server may be one.
        now: The time.
        revoked: Sites and operators whose keys are revoked.

    Returns:
        A line per end: which files were kept, which are new; if keys are only revoked, a line per key.
    """
    from lit_fed.federation.keys.authority import AUTHORITY, KEYS, OPERATORS, REVOKED, SITES, Keyring, write
    from lit_fed.federation.keys.node_keys import key_of

    ends = [SERVER, *(site.name for site in file.sites), *file.operators]
    _check_names("new_key", anew, ends, file)
    _check_names("revoke", revoked, ends[1:], file)
    keyring = Keyring(output, file.names, now, anew, file.operators)
    for name in revoked:  # before anything else that could fail
        keyring.revoke(name)
    if revoked and not anew:
        return [f"{name:11} its key is revoked; copy {output / SERVER / REVOKED} to the server" for name in revoked]
    _check(output)
    configs = _configurations(file)
    keyring.check(ends[1:])
    homes = {SERVER: output / SERVER, **{site.name: output / SITES / site.name for site in file.sites}}
    homes |= {name: output / OPERATORS / name for name in file.operators}
    for folder in (output, output / AUTHORITY, *homes.values()):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_half_written(folder, names=".+")
    keyring.list_revoked()
    done = {
        AUTHORITY: keyring.authority(),
        **{name: keyring.end(name) for name in tracked(ends, "keys and certificates", len(ends))},
    }
    ca = (output / AUTHORITY / "ca.crt").read_bytes()
    summed = bool((yaml.safe_load(configs[SERVER]).get("trainer") or {}).get("secure_sum"))
    peers = "".join(f"{key_of(keyring.certificate(site.name))}  # {site.name}\n" for site in file.sites)
    texts = {SERVER: _texts_of_server(file), **{site.name: _texts_of_site(file, site, summed) for site in file.sites}}
    for name, text in configs.items():
        texts[name] |= {"config.yaml": text} | ({_PEERS: _OF_PEERS + peers} if summed and name != SERVER else {})
    texts |= {name: {"README.md": _of_operator(file, name)} for name in file.operators}
    for name, home in homes.items():
        content = {"ca.crt": ca, **{path: text.encode() for path, text in texts[name].items()}}
        if name != SERVER:
            content["operator.crt" if name in file.operators else "node.crt"] = keyring.certificate(name)
        new = [path for path, blob in content.items() if write(home / path, blob)]
        done[name] += f"; written: {', '.join(new)}" if new else "; its other files are unchanged"
    lines = [f"{name:11} {words}" for name, words in done.items()]
    gone = [path for path in sorted((output / SERVER / KEYS).glob("*.crt")) if path.stem not in homes]
    lines += [f"{path.stem:11} is no longer an end, and its key is not accepted; remove {path}" for path in gone]
    return lines


def _check(output: Path) -> None:
    """Refuse a folder with other content and no federation."""
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output {output} is not a folder; name a new one")
    there = {path.name for path in output.iterdir()} if output.is_dir() else set[str]()
    odd = sorted(name for name in there - _FOLDERS if not name.startswith("."))
    if odd and "authority" not in there:
        raise ConfigError(f"--output {output} holds {odd[0]}, which is not part of a federation; name a new folder")


def _check_names(option: str, names: Sequence[str], ends: Sequence[str], file: FederationFile) -> None:
    """Refuse names of unknown ends."""
    for name in names:
        if name not in ends:
            meant = close(name, ends)
            raise ConfigError(
                f"--{option} {name} is not an end in {file.path}; "
                + (f"did you mean {meant}?" if meant else f"choose {join_or(ends)}")
            )


def _configurations(file: FederationFile) -> dict[str, str]:
    """Resolved configuration of each end, by its name; they differ only in an end's own settings of the data."""
    line = CommandLine(["federate", *(word for path in file.configs for word in ("-c", path))])
    parser = Parser(exit_on_error=False)
    add_run(parser)
    trainer, parts = make(Call(line.parse(parser), parser, line.words))
    content = yaml.safe_load(trainer.settings.config)
    cls, init_args = content["data"]["class_path"], content["data"].get("init_args") or {}
    num_clients = init_args.get("num_clients", parts.data.num_clients)
    if num_clients is None:
        raise ConfigError(f"data.num_clients is not set in {', '.join(file.configs)}; set the number of clients")
    check_everybody(file, num_clients)
    texts = {}
    for name, own_settings in {SERVER: file.server_data, **{site.name: site.data for site in file.sites}}.items():
        for key in own_settings.keys() - init_args.keys():
            raise ConfigError(f"federation file {file.path}: data.{key} of {name} is not a setting of {cls}; remove it")
        here = {"class_path": cls, "init_args": {**init_args, **own_settings}}
        texts[name] = yaml.safe_dump({**content, "data": here}, sort_keys=False, allow_unicode=True)
    return texts


# ---------------------------------------------------------------------- files of each end


def _texts_of_server(file: FederationFile) -> dict[str, str]:
    """Files of the server's folder except keys, certificates and the configuration."""
    from lit_fed.federation.keys.authority import KEYS, REVOKED
    from lit_fed.federation.keys.node_keys import OPERATOR

    bind = "" if file.bind is None else f"--bind {file.bind} "
    command = (
        f"lit-fed federate -c config.yaml --server {file.address} {bind}--ca ca.crt --certificate server.crt "
        f"--key server.key --node_keys node_keys.yaml --revoked {REVOKED} --ckpt_path last"
    )
    node_keys = "".join(f"{KEYS}/{site.name}.crt: {_claim(site)}\n" for site in file.sites)
    node_keys += "".join(f"{KEYS}/{name}.crt: {OPERATOR}\n" for name in file.operators)
    return {"node_keys.yaml": _NODE_KEYS + node_keys} | _texts(
        _OF_SERVER, SERVER, command, what="server", address=file.address, port=file.port
    )


def _claim(site: Site) -> str:
    clients = str(list(site.clients))
    return clients if site.most_samples is None else f"{{clients: {clients}, most_samples: {site.most_samples}}}"


def _texts_of_site(file: FederationFile, site: Site, summed: bool) -> dict[str, str]:
    """Files of a site's folder except its key, the authority's certificate and the configuration."""
    who = "client" if len(site.clients) == 1 else "clients"
    clients = f"{who} {', '.join(map(str, site.clients))}"
    command = (
        f'lit-fed node -c config.yaml --client_position "{json.dumps(site.clients, separators=(",", ":"))}" '
        f"--server {file.address} --ca ca.crt --certificate node.crt --key node.key --state_dir state"
        f"{f' --peers {_PEERS}' * summed}"
    )
    return _texts(_OF_SITE, site.name, command, what=clients, address=file.address, clients=clients)


def _of_operator(file: FederationFile, name: str) -> str:
    options = f"--server {file.address} --ca ca.crt --certificate operator.crt --key operator.key"
    return _OF_OPERATOR.format(name=name, address=file.address, options=options)


def _texts(readme: str, name: str, command: str, **facts: Any) -> dict[str, str]:
    """Instructions for starting an end, and its systemd unit."""
    service = f"lit_fed-{name}"
    unit = f"{service}.service"
    facts |= {"name": name, "command": command, "unit": unit, "version": __version__}
    installation = _SERVICE.format(name=name, unit=unit, service=service)
    return {"README.md": readme.format(service=installation, **facts), unit: _UNIT.format(**facts)}
