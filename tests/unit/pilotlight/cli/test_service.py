"""The systemd unit of `pilotlight service print`: its command line, its errors, and what systemd says about it."""

from __future__ import annotations

import getpass
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from pilotlight.cli.main import cli, serve
from pilotlight.cli.service import STOP_MARGIN_S, quote


class Done(NamedTuple):
    status: int
    stdout: str
    stderr: str


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    def run(*words: str) -> Done:
        with pytest.raises(SystemExit) as ended:
            cli(["service", "print", *words], prog_name="pilotlight")
        return Done(int(ended.value.code or 0), *capfd.readouterr())

    return run


def value(unit: str, key: str) -> str:
    (found,) = (line.removeprefix(f"{key}=") for line in unit.splitlines() if line.startswith(f"{key}="))
    return found


def test_unit_runs_serve_with_absolute_paths_and_the_given_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., Done]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("-c", "d.yaml", "--listen", ":9000", "--gateways", "2", "--keep-engines", "--grace", "60", "my model.gguf")
    done = run(*words, "--state", "state")
    assert done.status == 0, done.stderr
    _, found = value(done.stdout, "ExecStart").split(" serve ")
    assert found == (
        f'"{tmp_path}/my model.gguf" --config {tmp_path}/d.yaml --listen 0.0.0.0:9000 --state {tmp_path}/state'
        " --gateways 2 --keep-engines --grace 60"
    )
    assert value(done.stdout, "TimeoutStopSec") == str(60 + STOP_MARGIN_S)
    assert value(done.stdout, "User") == getpass.getuser()


def test_unit_without_a_state_option_contains_the_default_state_folder(run: Callable[..., Done]) -> None:
    state = serve.make_context("serve", []).params["state"]
    assert value(run().stdout, "ExecStart").endswith(f" serve --state {state}")


def test_unit_for_a_user_manager_names_no_user(run: Callable[..., Done]) -> None:
    unit = run("--user-manager").stdout
    assert "User=" not in unit
    assert value(unit, "WantedBy") == "default.target"


@pytest.mark.parametrize(
    ("word", "quoted"),
    [
        ("/a/b.gguf", "/a/b.gguf"),
        ("/a b", '"/a b"'),
        ("100%", "100%%"),
        ("$HOME/x", "$$HOME/x"),
        ('a"b\\', '"a\\"b\\\\"'),
        ("a;b", '"a;b"'),
        ("", '""'),
    ],
)
def test_word_with_special_characters_is_quoted_for_a_systemd_unit(word: str, quoted: str) -> None:
    assert quote(word) == quoted


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--listen", "nonsense"), "Invalid value for '--listen'"),
        (("--frob",), "No such option '--frob'"),
        (("--print-config",), "--print-config starts no service: leave it out"),
        (("--user", "other-user"), "--user other-user: pass --state as well, a folder that this user can write"),
        (("--user", "a", "--user-manager"), "expected either --user or --user-manager"),
        (("a\nb.gguf",), "a unit cannot contain control characters"),
    ],
)
def test_invalid_service_argument_exits_2_and_prints_no_unit(
    words: tuple[str, ...], message: str, run: Callable[..., Done]
) -> None:
    done = run(*words)
    assert done.status == 2
    assert message in done.stderr
    assert done.stdout == ""


@pytest.mark.standard
def test_systemd_verifies_the_unit_without_a_warning(tmp_path: Path, run: Callable[..., Done]) -> None:
    if (program := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed (Debian: apt install systemd)")
    unit = tmp_path / "pilotlight-test.service"
    unit.write_text(run("--state", str(tmp_path / "100% of state")).stdout)
    done = subprocess.run([program, "verify", unit], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
