"""Whose code an error passed through: the user's, of which the traceback is shown, or that of installed packages."""

import sys
import traceback
from pathlib import Path

import pytest

import lit_fed
from lit_fed.errors import own_traceback, place_of, reason


def error_in(file: Path) -> BaseException:
    """An error whose only frame is in a file."""
    with pytest.raises(ZeroDivisionError) as caught:
        exec(compile("1 / 0", file, "exec"), {})
    error = caught.value
    while error.__traceback__ and error.__traceback__.tb_frame.f_code.co_filename != str(file):
        error.__traceback__ = error.__traceback__.tb_next
    return error


@pytest.mark.parametrize(
    "place", [".local/lib/python3.11/site-packages", "lib/python3/dist-packages", "beside/site-packages"]
)
def test_packages_outside_of_the_environment_are_not_the_users_own_code(place: str, tmp_path: Path) -> None:
    """``pip install --user`` installs outside of ``sys.prefix``, and a ``.pth`` file adds any folder."""
    assert own_traceback(error_in(tmp_path / place / "torch/optim.py")) == ""


def test_a_file_beside_them_is_the_users_own_code(tmp_path: Path) -> None:
    assert f'File "{tmp_path / "mine/net.py"}", line 1' in own_traceback(error_in(tmp_path / "mine/net.py"))
    assert place_of(traceback.extract_tb(error_in(tmp_path / "mine/net.py").__traceback__)).endswith(
        "mine/net.py, line 1"
    )


@pytest.mark.parametrize("beside", [sys.prefix, str(Path(lit_fed.__file__).parent)])
def test_a_folder_whose_name_begins_alike_is_the_users_own(beside: str) -> None:
    """``.venv2/`` beside ``.venv/``, and ``lit_fed_trials/`` beside ``lit_fed/``; by name alone, nothing is written."""
    error = error_in(Path(f"{beside}_trials/net.py"))
    assert f'File "{beside}_trials/net.py", line 1' in own_traceback(error)
    assert place_of(traceback.extract_tb(error.__traceback__)).endswith("_trials/net.py, line 1")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "import no_such_package.part",
            "it needs no_such_package, which is not installed; pip install 'no_such_package'",
        ),
        (
            "import msgspec.no_such_part",  # as torch asks onnxscript for the part that serves its release
            "it needs msgspec.no_such_part, which this version of msgspec lacks; pip install --upgrade 'msgspec'",
        ),
    ],
)
def test_a_missing_package_and_a_missing_part_of_an_installed_one_are_told_apart(line: str, said: str) -> None:
    with pytest.raises(ModuleNotFoundError) as caught:
        exec(line)
    assert reason(caught.value) == said
