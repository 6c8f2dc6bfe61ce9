"""What an installation must satisfy: one program under two names, the declared versions, a quiet import."""

import re
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points, requires, version
from itertools import chain

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from lit_fed import __version__
from tests.support import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINNED, FLOORS, FLOWER = (
    dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / name).read_text(), flags=re.M))
    for name in ("constraints.txt", "requirements/floors.txt", "requirements/flower.txt")
)


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def lowest(requirement: Requirement) -> list[str]:
    """The lowest version that a requirement admits."""
    return [part.version for part in requirement.specifier if part.operator == ">="]


def test_one_version() -> None:
    assert __version__ == PROJECT["version"]


def test_the_script_and_the_file_are_one_program() -> None:
    assert PROJECT["scripts"] == {"lit-fed": "lit_fed.command.start:main"}
    assert "from lit_fed.command.start import main" in (ROOT / "cli.py").read_text()
    installed = [script.value for script in entry_points(group="console_scripts") if script.name == "lit-fed"]
    if not installed:
        pytest.skip("lit-fed is not installed in this environment")
    assert installed[0] == "lit_fed.command.start:main"


def test_the_lowest_versions_that_are_tested_are_the_declared_ones() -> None:
    """Of every extra for users, too; what contributors install beside may not ask for less of the same packages."""
    extras = dict(PROJECT["optional-dependencies"])
    tools = [Requirement(text) for extra in ("dev", "references", "docs") for text in extras.pop(extra)]
    declared = [Requirement(text) for text in [*PROJECT["dependencies"], *chain(*extras.values())]]
    floors = {one.name: lowest(one) for one in declared}
    assert {name: [version] for name, version in FLOORS.items()} == floors
    assert [str(one) for one in tools if lowest(one) != floors.get(one.name, lowest(one))] == []


@pytest.mark.parametrize(
    ("pins", "extras"),
    [(PINNED, ("dev", "references")), (FLOWER, ("dev",))],
    ids=["constraints.txt", "flower.txt"],
)
def test_the_tested_versions_lie_in_the_declared_ranges(pins: dict[str, str], extras: tuple[str, ...]) -> None:
    normal = {name.lower().replace("_", "-"): pinned for name, pinned in pins.items()}
    optional = [text for extra in extras for text in PROJECT["optional-dependencies"][extra]]
    for requirement in map(Requirement, [*PROJECT["dependencies"], *optional]):
        pinned = normal.get(requirement.name.lower().replace("_", "-"))
        assert pinned is not None, f"{requirement.name} is not pinned"
        assert Version(pinned) in requirement.specifier, f"{requirement} excludes the tested {pinned}"


def test_no_library_is_shut_out_below_its_next_major_release() -> None:
    """A private name that a later release lacks has a plain way beside it (`tests/test_private_names.py`)."""
    ranges = {Requirement(entry).name: Requirement(entry).specifier for entry in PROJECT["dependencies"]}
    assert "2.11.0" in ranges["torch"]
    assert "0.26.0" in ranges["torchvision"]
    assert "2.6.6" in ranges["lightning"]
    assert PINNED["torch"] in ranges["torch"]
    majors = {"torch": 2, "torchvision": 0, "torchmetrics": 1, "lightning": 2, "jsonargparse": 4}
    for name, major in majors.items():
        assert f"{major}.99.0" in ranges[name]
        assert f"{major + 1}.0.0" not in ranges[name]


def test_this_environment_has_what_is_declared() -> None:
    for requirement in map(Requirement, PROJECT["dependencies"]):
        assert Version(version(requirement.name)) in requirement.specifier
        for extra in requirement.extras:
            assert any(f'extra == "{extra}"' in entry for entry in requires(requirement.name) or [])


def test_importing_opens_no_connection() -> None:
    blocked = "import socket\ndef no(*a, **k): raise OSError('no network at import')\nsocket.socket.connect = no\n"
    code = f"{blocked}import lit_fed, lit_fed.command.federated_cli, lit_fed.data, lit_fed.methods\nprint('quiet')"
    assert python(code) == "quiet"
