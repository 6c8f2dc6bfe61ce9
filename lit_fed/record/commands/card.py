"""``lit-fed card RUN``: write one page about a run, which follows from the files that its record names, and sign it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from math import isclose, isnan, sqrt
from pathlib import Path
from statistics import fmean, stdev

from jsonargparse import ArgumentParser

from lit_fed.callbacks.recorder import RoundTable
from lit_fed.command.command import Call
from lit_fed.engine.loop.checkpoint import read_checkpoint
from lit_fed.engine.storage.files import write_text
from lit_fed.errors import ConfigError
from lit_fed.federation.keys.passphrase import read_passphrase
from lit_fed.federation.keys.statements import Certificates, SigningKey
from lit_fed.handover.card import facts_of, run_sections, table
from lit_fed.record.check import Check
from lit_fed.record.lines import NAME
from lit_fed.record.signed import Authorities, trusted

FILE = "card.md"
_SIGNED, _END = "\n## Signature\n\nOf the page above, by the key of this certificate.\n\n```json\n", "\n```\n"


@dataclass(frozen=True)
class _Options:
    """Options of a page.

    Args:
        certificate: certificate of the server, to sign the page
        key: private key of the certificate
        key_passphrase_file: file with the passphrase of an encrypted key
    """

    certificate: str | None = None
    key: str | None = None
    key_passphrase_file: str | None = None


def add_arguments(parser: ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("run", type=Path, help="folder of a run with record.jsonl")
    parser.add_class_arguments(_Options, as_group=False)


def run(call: Call) -> int:
    """Write the page into the run's folder; an older one is replaced."""
    options, check = call.settings, Check(call.settings.run)
    if (options.certificate is None) != (options.key is None):
        raise ConfigError("--certificate and --key sign the page together; give both, or neither")
    page, end = card_of(check), ""
    if options.key is not None:
        key = SigningKey.read(None, options.certificate, options.key, read_passphrase(options.key_passphrase_file))
        signed = key.signed("card", {"page": _hash(page)}) | {"certificates": key.certificates}
        end = f"{_SIGNED}{json.dumps(signed, indent=1)}{_END}"
    write_text([page, end], check.folder / FILE)
    print(f"written     {check.folder / FILE}")
    return 0


def card_faults(check: Check, authorities: Authorities) -> Iterator[str]:
    """What is wrong with the page, if there is one; print who has signed it."""
    path = check.folder / FILE
    page, is_signed, end = path.read_text(encoding="utf-8").partition(_SIGNED) if path.is_file() else ("", "", "")
    if page and page != card_of(check):
        yield f"{FILE} does not say what the run's files do; write it again with lit-fed card"
    if not is_signed:
        return
    try:
        text, *rest = end.split(_END)
        signed, certificates = json.loads(text), Certificates()
        odd = [*trusted(certificates, signed.pop("certificates"), signed["key"], "server", authorities)]
        if odd or rest != [""] or signed["page"] != _hash(page) or certificates.objection("card", signed):
            raise ValueError(*odd)
        print(f"signed      {FILE} by {certificates[signed['key']][0].subject.rfc4514_string()}")
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        yield f"{FILE} has a signature that does not hold; write it again with lit-fed card ({error})"


def _hash(text: str) -> str:
    return sha256(text.encode()).hexdigest()


def card_of(check: Check) -> str:
    """The page of a run after its newest checkpoint, in Markdown.

    Raises:
        CheckpointError: If the run has no checkpoint.
    """
    path = check.folder / "checkpoints" / "last.ckpt"
    facts, start = facts_of(read_checkpoint(path), path), check.starts[-1]["facts"]
    models = check.rounds.get(facts.rounds - 1, {}).get("global", {})
    hashes = {"configuration": _hash(start["config"])}
    hashes |= {f"global model, {kind}": found for kind, found in models.items()} | {f"end of {NAME}": check.last}
    lines = [f"# A run of {facts.method} on {facts.data[0]}", ""]
    lines += run_sections(replace(facts, versions=start["versions"] | start["machine"]))
    lines += ["## Intervals", "", *_intervals(check.folder, facts.metrics, facts.rounds - 1), ""]
    lines += ["## Hashes", "", f"`lit-fed verify` compares these SHA-256 and this page with `{NAME}`.", ""]
    return "\n".join([*lines, *table(hashes), ""])


def _intervals(folder: Path, metrics: Mapping[str, float], round_idx: int) -> Iterator[str]:
    """The 95 % confidence intervals of means over clients by Student's t: m ± t·s/√n, as of studies over seeds."""
    columns = defaultdict[tuple[str, str], list[float]](list)
    for row in RoundTable(folder / "clients.csv").rows():
        if int(row["round"]) == round_idx and row["stage"] != "train" and not isnan(value := float(row["value"])):
            columns[row["stage"], f"{row['metric']}_mean"].append(value)
    known = {
        name: column
        for (_, mean), column in columns.items()
        for name, value in metrics.items()
        if name.partition("/")[2] == mean and isclose(fmean(column), value) and len(column) > 1
    }
    if not known:
        yield "No result is a mean over clients whose values the run keeps: none has an interval."
        return
    from scipy.stats import t  # takes a second to import

    yield "Means over clients with their 95 % confidence interval; any other result is a single number, and has none."
    yield from ("", "| metric | mean | interval | clients |", "|---|---|---|---|")
    for name, column in known.items():
        half = float(t.ppf(0.975, len(column) - 1)) * stdev(column) / sqrt(len(column))
        yield f"| `{name}` | {metrics[name]:.6g} | ± {half:.3g} | {len(column)} |"
