"""Every test of the command line runs in a folder of its own, and reads errors in the command line's language."""

import pytest

from lit_fed.command.cli import main
from lit_fed.errors import errors_name_options
from tests.command.support import command


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def in_the_language_of_options():
    with errors_name_options():
        yield


@pytest.fixture(scope="module")
def run_of_two_rounds(tmp_path_factory):
    """A finished run; tests copy what they change."""
    folder = tmp_path_factory.mktemp("trained")
    main(command("fit", "--trainer.max_rounds", "2", "--trainer.default_root_dir", folder))
    return folder / "lightning_logs" / "version_0"
