"""A reload of `serve` applies valid changes despite an unusable GGUF file, and keeps secret values in private files."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from autoscaler.documents.document_types import Documents
from autoscaler.drivers.local.state_directory import replace_file
from loadtest import tiny_gguf
from pilotlight.models.document_loading import gather_documents, load_files
from pilotlight.net.listen import Address
from pilotlight.processes.serve_options import ServeOptions
from pilotlight.processes.serve_reload import Reload

HEAD = "apiVersion: pilotlight.dev/v1alpha1\n"
SECRET = "s3cr3t-value"


class Serve:
    """What `serve` needs for a reload: its options and the documents that it wrote for its child processes."""

    def __init__(self, folder: Path, *models: Path) -> None:
        self.config, self.written = folder / "c.yaml", folder / "documents.yaml"
        self.config.write_text("")
        self.options = ServeOptions(
            models=models, configs=(self.config,), listen=Address("127.0.0.1", 0), ops=Address("127.0.0.1", 0),
            state=folder, gateways=1, keep_engines=False, grace_s=1.0, print_config=False,
        )  # fmt: skip
        self.reload = Reload(self.options, gather_documents(models, [self.config], folder), self.written)

    def configure(self, env: str) -> None:
        """Write a Model with this variable of its engine."""
        spec = f"{{engine: command, command: [x, '{{port}}'], env: {{T: '{env}'}}}}"
        self.config.write_text(f"{HEAD}kind: Model\nmetadata: {{name: x}}\nspec: {spec}\n")

    def documents(self) -> Documents:
        return load_files([self.written])


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a short path, since the path of a Unix socket is limited."""
    return tmp_path_factory.mktemp("s")


@pytest.fixture
def ada(folder: Path) -> Path:
    path = folder / "models" / "ada.gguf"
    path.parent.mkdir()
    tiny_gguf.make_model(path, "one two", context_tokens=256)
    return path


@pytest.mark.parametrize("is_named", [True, False])
def test_unusable_gguf_file_does_not_block_other_changes_at_a_reload(
    ada: Path, folder: Path, is_named: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    bob = ada.with_name("bob.gguf")
    bob.write_bytes(ada.read_bytes())
    serve = Serve(folder, *([ada, bob] if is_named else [ada.parent]))
    serve.configure("1")
    bob.write_bytes(b"")
    assert serve.reload()
    assert [model.name for model in serve.documents().models] == ["x", "ada"]
    assert not serve.written.with_suffix(".problem").exists()
    assert f"pilotlight: {bob}: left out: the file is empty\n" in capfd.readouterr().err


def test_reload_fails_if_no_model_remains(ada: Path, folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    serve = Serve(folder, ada)
    assert serve.reload()
    ada.unlink()
    assert not serve.reload()
    assert [model.name for model in serve.documents().models] == ["ada"]
    line = f"{ada}: No such file or directory; the last valid documents stay in force"
    assert line in capfd.readouterr().err
    assert serve.written.with_suffix(".problem").read_text() == line


def test_reload_rereads_secret_references_and_never_logs_their_values(
    ada: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    serve, secret = Serve(folder, ada), folder / "secret"
    replace_file(secret, f"{SECRET}-1\n".encode())
    serve.configure(f"file:{secret}")
    for number in (1, 2):
        secret.write_text(f"{SECRET}-{number}\n")
        assert serve.reload()
        assert serve.documents().models[0].spec.env == {"T": f"{SECRET}-{number}"}
    assert stat.S_IMODE(serve.written.stat().st_mode) == 0o600
    secret.unlink()
    assert not serve.reload()
    assert serve.documents().models[0].spec.env == {"T": f"{SECRET}-2"}
    err = capfd.readouterr().err
    assert f"{serve.config}: Model x: spec.env.T: file:{secret}: No such file or directory; the last" in err
    assert SECRET not in err
