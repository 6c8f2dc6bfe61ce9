"""Every field of what nodes and the server have signed is changed in turn, and each change is found and named."""

from __future__ import annotations

import csv
import json
import shutil
import statistics
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from lit_fed.command.cli import main
from lit_fed.federation.keys.statements import read_certificates
from lit_fed.methods import FedAvg
from lit_fed.privacy import SecureSum
from lit_fed.record.check import Check
from lit_fed.record.signed import Signatures, SiteReceipts
from tests.federation.signing_support import Keys, made_keys, signed_run
from tests.federation.support import small
from tests.record.commands.test_verify import verified
from tests.record.test_check import edited, places, without, write
from tests.support import Points

ROUNDS = 3


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return made_keys(tmp_path_factory.mktemp("keys"))


def made(folder: Path, keys: Keys, **more: Any) -> Path:
    """A run's folder, with the receipts of the site of clients 1 and 2 beside it."""
    settings = {"max_rounds": ROUNDS, "record": True, **more}
    run = signed_run(small(data=lambda: Points(4), algorithm=FedAvg, **settings), keys, folder).log_dir
    (run / "config.yaml").write_text("", encoding="utf-8")
    shutil.copyfile(folder / "node_1/states/receipts.jsonl", run / "receipts.jsonl")
    return run


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, keys: Keys) -> Path:
    return made(tmp_path_factory.mktemp("whole"), keys)


@pytest.fixture(scope="module")
def summed(tmp_path_factory: pytest.TempPathFactory, keys: Keys) -> Path:
    return made(tmp_path_factory.mktemp("summed"), keys, secure_sum=SecureSum(3, 8.0))


def faults(run: Path, keys: Keys, alone: bool = True) -> list[str]:
    """Those of the record by itself, as of one that was forged throughout, and of the site's receipts by it."""
    authorities = read_certificates("--ca", keys.ca)
    record = Signatures(Check(run / "record.jsonl" if alone else run), authorities)
    found = [*record.check.run(), *record.faults()]
    return [*found, *SiteReceipts(run / "receipts.jsonl", authorities).faults(record)]


def lines_of(run: Path, name: str = "record.jsonl") -> list[Any]:
    return [json.loads(line) for line in (run / name).read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("which", ["whole", "summed"])
def test_every_entry_of_signatures_is_changed_in_turn_with_all_links_anew(
    which: str, keys: Keys, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The record's signatures by themselves: whoever forges it has no key of a node."""
    shutil.copytree(request.getfixturevalue(which), tmp_path / "run")
    run, count = tmp_path / "run", 0
    authorities, before = read_certificates("--ca", keys.ca), lines_of(tmp_path / "run")
    for number, line in enumerate(before):
        for place in places(line):
            if place[0] not in ("signed", "certificates", "signing") or place == ("signing", "packed"):
                continue
            edited(number, *place, value="other", anew=True)(run)
            record = Signatures(Check(run / "record.jsonl"), authorities)
            assert list(record.faults()), (number, place)
            without(number, *place, anew=True)(run)
            record = Signatures(Check(run / "record.jsonl"), authorities)
            assert list(record.faults()), (number, place, "left out")
            write(run, before)
            count += 2
    assert count > (200 if which == "whole" else 100)
    assert list(Signatures(Check(run / "record.jsonl"), authorities).faults()) == []


def test_every_entry_of_receipts_is_changed_in_turn_with_all_links_anew(
    keys: Keys, whole: Path, tmp_path: Path
) -> None:
    """By themselves: without the record."""
    path, authorities = tmp_path / "receipts.jsonl", read_certificates("--ca", keys.ca)
    before, count = lines_of(whole, "receipts.jsonl"), 0
    for number, line in enumerate(before):
        listed = {**line, "receipts": dict(enumerate(line["receipts"]))}
        for place in places(listed):
            if place[0] == "previous":
                continue
            for change in (lambda inside, key: inside.update({key: "other"}), lambda inside, key: inside.pop(key)):
                lines: list[Any] = json.loads(json.dumps(before))
                inside: Any = lines[number]
                for key in place[:-1]:
                    inside = inside[key]
                if isinstance(inside, list):
                    inside[place[-1]] = "other"
                else:
                    change(inside, place[-1])
                chained(path, lines)
                assert list(SiteReceipts(path, authorities).faults(None)), (number, place)
                count += 1
    assert count > 100
    chained(path, before)
    assert list(SiteReceipts(path, authorities).faults(None)) == []


def chained(path: Path, lines: list[Any]) -> None:
    texts, last = list[str](), "0" * 64
    for line in lines:
        texts.append(json.dumps(line | {"previous": last}, sort_keys=True, separators=(",", ":")) + "\n")
        last = sha256(texts[-1].encode()).hexdigest()
    path.write_text("".join(texts), encoding="utf-8")


def in_receipts(change: Callable[[list[Any]], Any], anew: bool = True) -> Callable[[Path, Keys], None]:
    def run_change(run: Path, keys: Keys) -> None:
        lines = lines_of(run, "receipts.jsonl")
        change(lines)
        if anew:
            chained(run / "receipts.jsonl", lines)
        else:
            text = "".join(json.dumps(line, sort_keys=True, separators=(",", ":")) + "\n" for line in lines)
            (run / "receipts.jsonl").write_text(text, encoding="utf-8")

    return run_change


def in_record(change: Callable[[Path], None]) -> Callable[[Path, Keys], None]:
    return lambda run, keys: change(run)


def both_exchanged(lines: list[Any]) -> None:
    one, other = lines[2]["signed"]["1"], lines[3]["signed"]["1"]
    lines[2]["signed"]["1"], lines[3]["signed"]["1"] = other, one


def as_of_client(lines: list[Any]) -> None:
    lines[2]["signed"]["2"] = lines[2]["signed"]["1"]


def on_lines(change: Callable[[list[Any]], None]) -> Callable[[Path, Keys], None]:
    def run_change(run: Path, keys: Keys) -> None:
        lines = lines_of(run)
        change(lines)
        write(run, lines, anew=True)

    return run_change


def dropped(lines: list[Any]) -> None:
    for line in lines:
        for name in ("signed", "certificates", "signing"):
            line.pop(name, None)


def self_made(run: Path, keys: Keys) -> None:
    """The site signs a receipt itself, as if its own certificate were the server's."""
    site, lines = keys.sites[1], lines_of(run, "receipts.jsonl")
    for line in lines:
        line["server"] = site.certificates
        for place, one in enumerate(line["receipts"]):
            content = {name: entry for name, entry in one.items() if name not in ("key", "signature")}
            line["receipts"][place] = site.signed("receipt", content | {"fate": "dropped"})
    chained(run / "receipts.jsonl", lines)


UPDATE = "round 1: the update of client 1 is not one that its node signed"
CHANGES: list[tuple[str, Callable[[Path, Keys], None], str]] = [
    ("an update's hash, anew", in_record(edited(2, "updates", "1", "sha256", anew=True)), UPDATE),
    ("an update's weight, anew", in_record(edited(2, "updates", "1", "weight", value=7, anew=True)), UPDATE),
    ("an update left out, anew", in_record(without(2, "updates", "1", anew=True)), "signed, and is left out"),
    ("an update let in, anew", in_record(edited(2, "updates", "9", value={"sha256": "0" * 64, "weight": 1}, anew=True)),
     "the update of client 9 is not one that its node signed"),
    ("the broadcast, anew", in_record(edited(2, "broadcast", "model", anew=True)), "signed.0.received is 0000"),
    ("a statement left out, anew", in_record(without(2, "signed", "1", anew=True)), UPDATE),
    ("statements of two rounds exchanged", on_lines(both_exchanged), "round 1: signed.1.round is 1 there and 2 here"),
    ("a statement as another client's", on_lines(as_of_client), "signed.2.clients.0 is 2 there and 1 here"),
    ("all signatures removed", on_lines(dropped), "has no receipt of the run of record.jsonl"),
    ("a metric, anew", in_record(edited(2, "metrics", "global/loss", value=0.5, anew=True)),
     "the receipt of round 1 for clients [1]: line is"),
    ("a fate, anew", in_record(edited(2, "cohort", "1", value=["late", None], anew=True)), "fate is late there and"),
    ("a round left out", on_lines(lambda lines: lines.__delitem__(2)), "record.jsonl has round 2 where 1 is due"),
    ("a receipt's link", in_receipts(lambda lines: lines[1].update(previous="0" * 64), anew=False), "does not follow"),
    ("a line of receipts removed", in_receipts(lambda lines: lines.pop(1)), "lacks the receipt of round 1"),
    ("the last receipts removed", in_receipts(lambda lines: lines.pop()), "lacks the receipt of round 2"),
    ("one receipt removed", in_receipts(lambda lines: lines[1]["receipts"].pop()), "lacks the receipt of round 2 for"),
    ("receipts of the site's own making", self_made, "the certificate CN=lit_fed site_1 is not a server's"),
    ("no receipt at all", in_receipts(lambda lines: lines.clear()), "has no receipt of the run"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "named"), [one[1:] for one in CHANGES], ids=[one[0] for one in CHANGES])
def test_a_change_is_found_and_named(
    change: Callable[[Path, Keys], None], named: str, keys: Keys, whole: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    assert faults(run, keys) == []
    assert faults(run, keys, alone=False) == []
    change(run, keys)
    found = faults(run, keys)
    assert any(named in fault for fault in found), found


def test_another_runs_receipts_say_nothing_of_it(keys: Keys, whole: Path, summed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    shutil.copyfile(summed / "receipts.jsonl", run / "receipts.jsonl")
    assert any("has no receipt of the run of record.jsonl" in one for one in faults(run, keys))


# ---------------------------------------------------------------------- the command line


def test_the_command_says_what_it_has_checked_and_by_whose_word(
    keys: Keys, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, ca, receipts = tmp_path / "run", ("--ca", keys.ca), ("--receipts", whole / "receipts.jsonl")
    shutil.copytree(whole, run)
    status, told = verified(capsys, run, *ca, *receipts)
    assert status == 0
    assert told.splitlines()[1:] == [
        "signed      12 statements of nodes",
        f"whole       6 receipts in {whole / 'receipts.jsonl'}",
    ]
    believed = ", by the certificates beside them, which --ca would check"
    assert f"signed      12 statements of nodes{believed}\n" in verified(capsys, run)[1]
    assert verified(capsys, run / "record.jsonl", *ca, *receipts) == (0, told)
    assert verified(capsys, *receipts)[1] == f"whole       6 receipts in {whole / 'receipts.jsonl'}{believed}\n"
    status, told = verified(capsys, run, "--ca", made_keys(tmp_path / "others").ca, *receipts)
    assert status == 1
    assert "differs     round 0: the certificate CN=lit_fed site_0 is not issued by the authority\n" in told


def test_what_is_missing_is_said_in_a_line(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def line(*words: Any) -> str:
        status, told = verified(capsys, *words)
        assert status in (1, 2)
        return told.splitlines()[-1]

    assert "the folder of a run is missing; give it, or --receipts alone" in line()
    assert "--rounds and --against are without the folder of a run; give it" in line("--rounds", "all")
    assert "--rounds and --against are without the folder" in line(whole / "record.jsonl", "--rounds", "all")
    assert f"--receipts {tmp_path} is not a file; give a node's receipts.jsonl" in line(whole, "--receipts", tmp_path)
    assert f"--ca {whole / 'record.jsonl'} is not a certificate" in line(whole, "--ca", whole / "record.jsonl")


def test_the_page_is_signed_and_any_change_of_it_is_found(
    keys: Keys, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder = tmp_path / "run", keys.ca.parents[1]
    shutil.copytree(whole, run)
    files = {name: str(folder / f"server/server.{name}") for name in ("crt", "key")}
    main(["card", str(run), "--certificate", files["crt"], "--key", files["key"]])
    page = (run / "card.md").read_text(encoding="utf-8")
    status, told = verified(capsys, run, "--ca", keys.ca)
    assert (status, told.splitlines()[0]) == (0, "signed      card.md by CN=lit_fed server")
    one = page.replace("## Results", "## Result")
    wrong = "card.md has a signature that does not hold"
    for odd, named in [
        (one, "card.md does not say what the run's files do"),
        (one, wrong),
        (page.replace('"signature": "30', '"signature": "31'), wrong),
        (page.replace('"page": "', '"page": "0'), wrong),
        (page.replace('"key": "', '"key": "0'), wrong),
        (page.replace("\n```\n", "\n"), wrong),
    ]:
        assert odd != page
        (run / "card.md").write_text(odd, encoding="utf-8")
        status, told = verified(capsys, run, "--ca", keys.ca)
        assert status == 1
        assert named in told
    site = [str(folder / "server/keys/site_0.crt"), str(folder / "sites/site_0/node.key")]
    main(["card", str(run), "--certificate", site[0], "--key", site[1]])
    assert (
        f"{wrong}; write it again with lit-fed card (the certificate CN=lit_fed site_0 is not a server's)"
        in (verified(capsys, run, "--ca", keys.ca)[1])
    )
    with pytest.raises(SystemExit):
        main(["card", str(run), "--key", site[1]])
    assert "--certificate and --key sign the page together; give both, or neither" in capsys.readouterr().err


def test_the_pages_interval_is_students(keys: Keys, whole: Path, tmp_path: Path) -> None:
    """Of four clients t = 3.1824 (a table's value at 0.975 and 3 degrees of freedom)."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    main(["card", str(run)])
    with open(run / "clients.csv", newline="", encoding="utf-8") as file:
        rows = [
            row for row in csv.DictReader(file) if (row["round"], row["stage"], row["metric"]) == ("2", "test", "loss")
        ]
    values = [float(row["value"]) for row in rows]
    half = 3.1824 * statistics.stdev(values) / 2
    mean = statistics.fmean(values)
    assert f"| `clients/loss_mean` | {mean:.6g} | ± {half:.3g} | 4 |" in (run / "card.md").read_text(encoding="utf-8")
