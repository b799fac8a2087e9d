"""The command line: an example in every help text, one-line errors, exit codes, documents unchanged."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml
from click.testing import CliRunner, Result

from autoscaler.documents.parse import parse_documents
from loadtest import tiny_gguf
from pilotlight import __main__, __version__
from pilotlight.cli.main import COMPILED, cli


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("PILOTLIGHT_"):
            monkeypatch.delenv(name)


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(word) for word in words], prog_name="pilotlight")


def commands(group: click.Group = cli, at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The words of each command and group."""
    yield at
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*at, name))
        else:
            yield (*at, name)


def parsed(example: list[str]) -> None:
    """Parse a command line without running it. Raises click's errors."""
    command: click.Command = cli
    context = click.Context(cli, info_name="pilotlight")
    while isinstance(command, click.Group):
        name, inner, example = command.resolve_command(context, example)
        assert name is not None
        assert inner is not None
        command, context = inner, inner.make_context(name, list(example), parent=context)


@pytest.mark.parametrize("words", list(commands()), ids=" ".join)
def test_every_help_shows_an_example_that_parses(words: tuple[str, ...]) -> None:
    shown = run(*words, "--help")
    assert shown.exit_code == 0
    text = " ".join(shown.output.split())
    assert "Example: pilotlight " in text
    example = text.rpartition("Example: pilotlight ")[2].split()
    assert tuple(example[: len(words)]) == words
    parsed(example)


def test_command_line_has_all_commands_of_the_expected_list() -> None:
    assert {" ".join(words) for words in commands()} >= {
        "serve", "gateway", "autoscaler", "agent", "status", "explain model", "explain last", "key new", "doctor",
        "wake", "stop", "cordon", "uncordon", "drain",
        "load run", "load coldstart", "weights pack", "weights inspect", "weights push",
    }  # fmt: skip


def test_version_option_prints_the_version() -> None:
    assert run("--version").output == f"pilotlight {__version__}{' (compiled)' if COMPILED else ''}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("frobnicate",), "No such command 'frobnicate'"),
        (("serve", "--frobnicate"), "No such option"),
        (("serve", "--listen", "8080"), "'8080' is not HOST:PORT such as 127.0.0.1:8080"),
        (("serve", "--gateways", "0"), "0 is not in the range 1<=x<=64"),
        (("serve",), "nothing to serve"),
        (("serve", "/nowhere/a.gguf"), "/nowhere/a.gguf: No such file or directory"),
        (("serve", "-c", "/nowhere/d.yaml"), "/nowhere/d.yaml: No such file or directory"),
        (("status", "--output", "xml"), "'xml' is not one of 'text', 'json'"),
        (("key", "new"), "Missing option '--tenant'"),
        (("key", "new", "--tenant", "a b"), "--tenant: expected 1 to 253 letters"),
        (("explain", "model"), "Missing argument 'NAME'"),
        (("explain", "llama"), "for a Model use `pilotlight explain model llama`"),
        (("gateway",), "Missing option '--autoscaler'"),
        (("gateway", "--autoscaler", "unix:x", "--limits", "{"), "--limits: "),
        (("gateway", "--autoscaler", "unix:x", "--limits", "\udcff"), "--limits: not valid JSON"),
        (("gateway", "--autoscaler", "unix:x", "--ops", ":8081"), "--ops 0.0.0.0:8081: other machines could reach"),
        (("key", "new", "--tenant", "a", "--role", "finance"), "--role finance: is not supported yet"),
        (("key", "new", "--tenant", "a", "--role", "king"), "'tenant', 'viewer', 'operator', 'finance'"),
        (
            ("load", "coldstart", "--url", "http://h", "--model", "m", "--from", "asleep"),
            "--from asleep is not supported",
        ),
    ],
)
def test_usage_error_prints_one_line_with_exit_status_2(words: tuple[str, ...], message: str) -> None:
    result = run(*words)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("pilotlight: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


@pytest.mark.standard
def test_status_of_a_closed_operations_port_exits_1_with_one_line() -> None:
    result = run("status", "--ops", "127.0.0.1:1")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("{engine: vllm, artifact: 'hf://a/b', slotz: 3}", "Model m: spec.slotz: "),
        ("{engine: vllm, artifact: 'hf://a/b', slots: '3'}", "Model m: spec.slots: expected"),
        ("{engine: vllm, artifact: 'hf://a/b', gpu: {memory: 20GB}}", "spec.gpu.memory: expected a size such as 16Gi"),
        ("{engine: vllm, artifact: 'hf://a/b', aliases: [m]}", "`m` is already"),
        ("{engine: vllm, artifact: 'hf://a/b', sleep: auto}", "spec.sleep: "),
    ],
)
def test_invalid_document_error_names_file_key_and_expectation(tmp_path: Path, spec: str, message: str) -> None:
    path = tmp_path / "d.yaml"
    path.write_text(f"apiVersion: pilotlight.dev/v1alpha1\nkind: Model\nmetadata: {{name: m}}\nspec: {spec}\n")
    result = run("serve", "-c", path, "--state", tmp_path)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert result.stderr.startswith(f"pilotlight: {path}: ")
    assert message in result.stderr


def test_public_listener_without_keys_suggests_key_new_or_auth_none(tmp_path: Path) -> None:
    tiny_gguf.make_model(tmp_path / "ada.gguf", "one two")
    result = run("serve", tmp_path / "ada.gguf", "--listen", ":0", "--state", tmp_path)
    assert result.exit_code == 2
    assert "pilotlight key new" in result.stderr
    assert "auth: none" in result.stderr


@pytest.mark.parametrize("ops", [":0", "10.0.0.1:8081", "[::]:8081", "ops.example:8081"])
def test_public_operations_port_is_rejected_with_alternatives(tmp_path: Path, ops: str) -> None:
    tiny_gguf.make_model(tmp_path / "ada.gguf", "one two")
    result = run("serve", tmp_path / "ada.gguf", "--ops", ops, "--state", tmp_path)
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    for way in ("127.0.0.1", "ssh tunnel", "reverse proxy", "auth: none"):
        assert way in result.stderr


def test_state_path_too_long_for_a_socket_is_rejected(tmp_path: Path) -> None:
    tiny_gguf.make_model(tmp_path / "ada.gguf", "one two")
    result = run("serve", tmp_path / "ada.gguf", "--state", tmp_path / ("d" * 100))
    assert (result.exit_code, "too long for a Unix socket" in result.stderr) == (2, True)


def test_printed_config_reproduces_the_same_documents(tmp_path: Path) -> None:
    tiny_gguf.make_model(tmp_path / "ada.gguf", "one two", context_tokens=256)
    config = tmp_path / "c.yaml"
    config.write_text(
        "apiVersion: pilotlight.dev/v1alpha1\nkind: Settings\ndevices: [{name: gpu0, memory: 1Gi}]\n---\n"
        "apiVersion: pilotlight.dev/v1alpha1\nkind: Model\nmetadata: {name: x}\n"
        "spec: {engine: command, command: [run, '{port}'], gpu: {memory: 1.5Gi}, idleSeconds: 3}\n"
    )
    first = run("serve", tmp_path / "ada.gguf", "-c", config, "--print-config", "--state", tmp_path)
    assert first.exit_code == 0
    printed = tmp_path / "printed.yaml"
    printed.write_text(first.stdout)
    assert [one["kind"] for one in yaml.safe_load_all(first.stdout)] == ["Model", "Model", "Settings"]
    again = run("serve", "-c", printed, "--print-config", "--state", tmp_path)
    assert again.stdout == first.stdout


def test_printed_config_contains_references_and_not_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "s3cr3t")
    config = tmp_path / "c.yaml"
    config.write_text(
        "apiVersion: pilotlight.dev/v1alpha1\nkind: Model\nmetadata: {name: x}\n"
        "spec: {engine: command, command: [run, '{port}', '${TOKEN}'], env: {A: '${TOKEN}'}}\n"
    )
    result = run("serve", "-c", config, "--print-config", "--state", tmp_path)
    assert (result.exit_code, result.stdout.count("${TOKEN}"), "s3cr3t" in result.output) == (0, 2, False)


def test_environment_variable_overrides_the_setting_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_gguf.make_model(tmp_path / "ada.gguf", "one two")
    words = ("serve", tmp_path / "ada.gguf", "--print-config", "--state", tmp_path)
    monkeypatch.setenv("PILOTLIGHT_AUTH", "none")
    assert parse_documents([("x", run(*words).stdout)]).settings.auth == "none"
    monkeypatch.setenv("PILOTLIGHT_AUHT", "none")
    result = run(*words)
    assert (result.exit_code, "PILOTLIGHT_AUHT" in result.stderr) == (2, True)


def test_a_new_key_is_printed_once_and_only_its_hash_is_stored(tmp_path: Path) -> None:
    result = run("key", "new", "--tenant", "acme", "--name", "ci", "--role", "tenant", "--state", tmp_path)
    assert result.exit_code == 0
    (key,) = [word for word in result.stdout.split() if word.startswith("pl-")]
    stored = (tmp_path / "keys.yaml").read_text()
    assert key not in stored
    (tenant,) = parse_documents([("keys", stored)]).tenants
    assert (tenant.name, tenant.spec.keys[0].role) == ("acme", "tenant")
    assert tenant.spec.keys[0].sha256 == hashlib.sha256(key.encode()).hexdigest()


def test_new_key_without_state_directory_prints_its_tenant_entry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("key", "new", "--tenant", "acme")
    assert "paste into Tenant acme:" in result.stdout
    assert "sha256" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_start_fails_if_another_package_replaces_a_product_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert __main__.find_foreign_package() is None
    monkeypatch.setattr(__main__, "OURS", ("gateway", "json"))
    with pytest.raises(SystemExit) as ended:
        __main__.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("pilotlight: the package 'json' is not Pilotlight's: ")
    monkeypatch.setattr(__main__, "OURS", ("no_such_package",))
    assert "is missing" in str(__main__.find_foreign_package())
