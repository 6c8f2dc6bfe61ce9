"""Addresses, folders that one program may use, and what is installed."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from lit_fed.errors import ConfigError
from lit_fed.federation.ends import (
    Alert,
    check_free,
    check_public,
    connect,
    is_loopback,
    keep_private,
    log_line,
    proxy_of,
    sole_user,
    split_address,
)
from tests.support import ROOT


@pytest.mark.parametrize("address", ["127.0.0.1", "host:", ":9092", "host:port", "host:70000", "host:0", ""])
def test_addresses_that_cannot_be(address: str) -> None:
    with pytest.raises(ConfigError, match=r"--bind is .*it must be a host and a port, such as 127\.0\.0\.1:9092"):
        split_address(address, "--bind")


@pytest.mark.parametrize(
    ("address", "here"),
    [("127.0.0.1:1", True), ("localhost:1", True), ("[::1]:1", True), ("127.1.2.3:1", True), ("0.0.0.0:1", False),
     ("192.0.2.7:1", False), ("localhost.example.org:1", False)],
)  # fmt: skip
def test_what_stays_on_this_machine(address: str, here: bool) -> None:
    assert is_loopback(address) is here


@pytest.mark.parametrize("address", ["0.0.0.0:9092", "[::]:9092"])
def test_everywhere_is_no_address_of_a_server(address: str) -> None:
    with pytest.raises(ConfigError) as told:
        check_public(address)
    assert f"and --bind {address} to listen on all interfaces" in str(told.value)
    check_public("fl.example.org:9092")


def test_an_address_that_is_taken_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as one:
        address = f"127.0.0.1:{one.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"cannot listen at {address}: address already in use; choose another"):
            check_free(address, "--bind")
    check_free(address, "--server")
    with pytest.raises(ConfigError, match=r"cannot listen at 192\.0\.2\.7:9092: .*; give an address of .* with --bind"):
        check_free("192.0.2.7:9092", "--server")


def test_a_folder_has_one_user_who_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "node"
    with sole_user(folder, "--state_dir"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        words = rf"--state_dir .*node is used by process {os.getpid()} on .* since "
        with pytest.raises(ConfigError, match=words), sole_user(folder, "--state_dir"):
            pytest.fail("two at once")
    with sole_user(folder, "--state_dir"):
        pass


def test_a_killed_user_holds_nothing(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path; from lit_fed.federation.ends import sole_user\n"
        "with sole_user(Path(sys.argv[1]), '--state_dir'): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, cwd=ROOT)
    assert (tmp_path / ".user").is_file()
    with sole_user(tmp_path, "--state_dir"):
        pass


def test_a_folder_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = r"--state_dir .*file/x is not writable \(.*\); name another"
    with pytest.raises(ConfigError, match=words), sole_user(tmp_path / "file" / "x", "--state_dir"):
        pytest.fail("a file has no folders")


def test_what_is_written_is_its_users_alone(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        keep_private()
        (tmp_path / "file").touch()
        (tmp_path / "folder").mkdir()
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("file", "folder")] == [0o600, 0o700]


@pytest.mark.parametrize("url", ["proxy:3128", "https://proxy:3128", "http://", "http://proxy:port", "socks5://proxy"])
def test_a_proxy_that_cannot_be_is_told(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--proxy is .*; it must be an HTTP proxy's URL, such as http://proxy\.exam"):
        proxy_of(url)
    monkeypatch.setenv("https_proxy", url)
    with pytest.raises(ConfigError, match="https_proxy is "):
        proxy_of("environment")


@pytest.mark.parametrize(
    "url",
    [
        "https://me:s3cret@proxy:3128",
        "http://me:s3/cret@proxy:3128",
        "http://me:s3@cret@proxy:99999",
        "http://me:s3 cret@proxy",
        "http://me:'s3cret'@proxy",
        "me:s3cret@proxy:3128",
    ],
)
def test_a_proxys_password_is_not_printed(url: str) -> None:
    with pytest.raises(ConfigError, match=r"--proxy is '…@proxy(:\d+)?'; it must be an HTTP proxy's URL") as told:
        proxy_of(url)
    assert "s3" not in str(told.value)


def test_a_proxy_is_given_or_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://one:3128")
    assert [proxy_of(word) for word in (None, "http://other:3128", "environment")] == [
        None, "http://other:3128", "http://one:3128",
    ]  # fmt: skip
    monkeypatch.delenv("https_proxy")
    with pytest.raises(ConfigError, match="--proxy is environment, and https_proxy is not set"):
        proxy_of("environment")


def test_a_proxy_that_refuses_is_an_error_of_the_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as proxy:

        def refuse() -> None:
            near, _ = proxy.accept()
            with near:
                near.recv(1000)
                near.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")

        thread = threading.Thread(target=refuse)
        thread.start()
        with pytest.raises(OSError, match=r"the proxy answers b'HTTP/1\.1 407 Proxy"):
            connect("fl.example.org:9092", f"http://127.0.0.1:{proxy.getsockname()[1]}", 5.0)
        thread.join()


# ---------------------------------------------------------------------- log lines


def test_a_line_of_the_log_has_date_level_and_text(capsys: pytest.CaptureFixture[str]) -> None:
    log_line("round 1 of 2")
    log_line(Alert("node 3 left with client 1"))
    date = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    said = capsys.readouterr().out
    assert re.fullmatch(rf"{date} INFO round 1 of 2\n{date} WARNING node 3 left with client 1\n", said)
