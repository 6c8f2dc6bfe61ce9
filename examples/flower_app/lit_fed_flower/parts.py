"""The run that a configuration describes, and a message of lit_fed as a record of Flower's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from lit_fed.command.command import Call
from lit_fed.command.reading.parts import ReadParts
from lit_fed.command.reading.words import CommandLine
from lit_fed.federation.commands.deployed import add_run, make
from lit_fed.federation.messages.body import Blob, Bytes
from lit_fed.parsing import Parser
from lit_fed.trainer import FederatedTrainer


def made(config: Mapping[str, Any]) -> tuple[FederatedTrainer, ReadParts]:
    """Make a trainer and its parts from the file ``config``, in the working directory ``folder``."""
    os.chdir(str(config["folder"]))
    line, parser = CommandLine(["federate", "-c", str(config["config"])]), Parser(exit_on_error=False)
    add_run(parser)
    return make(Call(line.parse(parser), parser, line.words))


def pack(blob: Bytes | Blob) -> RecordDict:
    """Wrap a message; Flower's records take no bytearray."""
    return RecordDict({"lit_fed": ConfigRecord({"blob": bytes(blob)})})


def unpack(content: RecordDict) -> bytes:
    """Return the message in a record."""
    blob = content.config_records["lit_fed"]["blob"]
    assert isinstance(blob, bytes)
    return blob
