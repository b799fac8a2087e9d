"""`pilotlight import`: its input, where documents and notes are written, and the exit status."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from autoscaler.documents.parse import parse_documents
from loadtest import tiny_gguf
from pilotlight.cli.main import cli
from pilotlight.models.document_loading import load_files, read_documents

PAGES = sorted((Path(__file__).parents[4] / "docs" / "tutorials").glob("from-*.md"))
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
KUBEAI = """
apiVersion: kubeai.org/v1
kind: Model
metadata: {name: tiny}
spec: {engine: VLLM, url: "hf://acme/tiny", features: [], owner: acme}
---
apiVersion: kubeai.org/v1
kind: Model
metadata: {name: speech}
spec: {engine: FasterWhisper, url: "hf://acme/speech", features: []}
"""


def run(*words: str | Path, stdin: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["import", *map(str, words)], prog_name="pilotlight", input=stdin)


def test_import_prints_documents_to_stdout_and_notes_to_stderr(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(KUBEAI)
    result = run("kubeai", file)
    assert result.exit_code == 1, "one of them was not converted"
    assert [model.name for model in parse_documents([("out", result.stdout)]).models] == ["tiny"]
    assert "# not converted: spec.owner: " in result.stdout
    assert "# Model speech is not converted: spec.engine: " in result.stdout
    first, second = result.stderr.splitlines()
    assert first.startswith("pilotlight: Model tiny: not converted: spec.owner: ")
    assert second.startswith("pilotlight: Model speech is not converted: spec.engine: ")


def test_import_with_json_output_prints_one_json_object(tmp_path: Path) -> None:
    result = run("kubeai", "-", "--output", "json", stdin=KUBEAI)
    whole = json.loads(result.stdout)
    assert [document["metadata"]["name"] for document in whole["documents"]] == ["tiny"]
    assert whole["notTakenOver"][0].keys() == {"of", "key", "why"}
    assert [each["of"] for each in whole["refused"]] == ["Model speech"]
    assert parse_documents([("json", json.dumps(whole["documents"][0]))]).models[0].name == "tiny"


def test_error_in_imported_standard_input_names_standard_input() -> None:
    result = run("llama-swap", "-", stdin="models: {m: {cmd: 3}}")
    assert result.exit_code == 2
    assert result.stderr == "pilotlight: standard input: models.m.cmd: expected text (put it in quotes)\n"
    assert run("llama-swap", "-", stdin="models: {m: {cmd: 'e ${PORT}'}}").exit_code == 0


def test_import_examples_in_the_documentation_give_the_shown_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each command turns the block before it into the block after it."""
    monkeypatch.chdir(tmp_path)
    blocks = [block for page in PAGES for block in BLOCK.findall(page.read_text())]
    tried = 0
    for (_, content), (language, command), (_, shown) in zip(blocks, blocks[1:], blocks[2:], strict=False):
        if language == "sh":
            _, _, kind, file = command.split()
            (tmp_path / file).write_text(content)
            assert run(kind, file).stdout == shown, command
            tried += 1
    assert tried == 4


@pytest.mark.parametrize(
    ("kind", "content", "message"),
    [
        ("kubeai", "kind: Pod", "kind: expected Model (kubeai.org/v1)"),
        ("kubeai", "a: [", "line 1: "),
        ("lingo", "kind: Pod", "metadata.annotations: expected a Deployment or StatefulSet"),
        ("llama-swap", "models: 3", "models: expected keys with values"),
        ("ollama", "FORM x", "line 1: expected one of FROM"),
    ],
)
def test_invalid_import_file_error_names_file_key_and_expectation(
    kind: str, content: str, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "x"
    file.write_text(content)
    found = run(kind, file)
    assert (found.exit_code, found.stdout) == (2, "")
    assert found.stderr.startswith(f"pilotlight: {file}: ")
    assert message in found.stderr
    assert found.stderr.count("\n") == 1


@pytest.mark.parametrize("content", ["", "kind: List\nitems: []"])
def test_import_without_models_prints_a_notice(content: str) -> None:
    result = run("kubeai", "-", stdin=content)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "pilotlight: standard input: no Model found\n"


def test_unreadable_import_file_is_a_one_line_error(tmp_path: Path) -> None:
    assert run("kubeai", tmp_path / "none").stderr == f"pilotlight: {tmp_path / 'none'}: No such file or directory\n"
    (tmp_path / "x").write_bytes(b"\xff")
    assert run("kubeai", tmp_path / "x").stderr == f"pilotlight: {tmp_path / 'x'}: not UTF-8\n"
    assert "expected Ollama's folder" in run("ollama", tmp_path).stderr
    assert run("ollama", "-", stdin="FROM x").stderr.endswith("add --name\n")
    assert run("kubeai", "--name", "x", tmp_path / "x").exit_code == 2


@pytest.mark.parametrize(
    ("path", "name"),
    [("mario.Modelfile", "mario"), ("Modelfile.mario", "mario"), ("mario/Modelfile", "mario"), ("mario", "mario")],
)
def test_imported_modelfile_model_is_named_after_the_file_path(path: str, name: str, tmp_path: Path) -> None:
    file = tmp_path / path
    file.parent.mkdir(exist_ok=True)
    file.write_text("FROM ./m.gguf")
    (model,) = parse_documents([("out", run("ollama", file).stdout)]).models
    assert model.name == name
    assert model.spec.artifact == f"file://{file.parent}/m.gguf"
    (called,) = parse_documents([("out", run("ollama", file, "--name", "other").stdout)]).models
    assert called.name == "other"


@pytest.mark.parametrize("output", ["yaml", "json"])
@pytest.mark.parametrize("path", ["\udcff.Modelfile", "\udcff/Modelfile", "\udcff/mario.Modelfile"])
def test_modelfile_with_a_path_that_is_not_utf8_is_refused_with_its_name(
    path: str, output: str, tmp_path: Path
) -> None:
    file = tmp_path / path
    file.parent.mkdir(exist_ok=True)
    file.write_text("FROM ./m.gguf")
    result = run("ollama", file, "--output", output)
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert " is not converted: " in result.stderr
    assert "\\udcff" in result.stderr
    if output == "json":
        assert json.loads(result.stdout)["documents"] == []
    else:
        assert parse_documents([("out", result.stdout)]).models == ()


@pytest.mark.parametrize("value", ["x\u3000y", "x\u202ey", "x\u00a0y", "caf\u00e9 \u6f22\u5b57"])
def test_imported_values_are_unchanged_by_the_escaping_of_output(value: str) -> None:
    stdin = KUBEAI.partition("---")[0].replace("owner: acme", f"env: {{A: {json.dumps(value)}}}")
    result = run("kubeai", "-", stdin=stdin)
    assert parse_documents([("out", result.stdout)]).models[0].spec.env["A"] == value
    assert (value in result.stdout) == value.isprintable()


def test_modelfile_directory_and_ollama_show_output_are_imported(tmp_path: Path) -> None:
    folder = tmp_path / "mario"
    folder.mkdir()
    (folder / "Modelfile").write_text("FROM ./m.gguf")
    assert parse_documents([("out", run("ollama", folder).stdout)]).models[0].name == "mario"
    shown = "# To build a new Modelfile based on this, replace FROM with:\n# FROM phi:mini\nFROM /m.gguf\n"
    assert parse_documents([("out", run("ollama", "-", stdin=shown).stdout)]).models[0].name == "phi:mini"


def store(folder: Path) -> Path:
    """An Ollama store with one model."""
    manifests = folder / ".ollama" / "models" / "manifests" / "registry.ollama.ai" / "library" / "tiny"
    blobs = folder / ".ollama" / "models" / "blobs"
    manifests.mkdir(parents=True)
    blobs.mkdir()
    layers = [
        {"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:aa"},
        {"mediaType": "application/vnd.ollama.image.params", "digest": "sha256:bb"},
    ]
    (manifests / "latest").write_text(json.dumps({"layers": layers}))
    (manifests / ".hidden").write_text("")
    tiny_gguf.make_model(blobs / "sha256-aa", "hello")
    (blobs / "sha256-bb").write_text('{"num_ctx": 128}')
    return folder / ".ollama"


def test_ollama_store_is_imported_with_its_blobs(tmp_path: Path) -> None:
    result = run("ollama", store(tmp_path))
    assert result.exit_code == 0
    out = tmp_path / "out.yaml"
    out.write_text(result.stdout)
    (model,) = read_documents(out).models
    assert model.spec.context_tokens == 128
    assert model.memory_bytes > 0, "its header is read, regardless of the file name"
    assert list(load_files([out]).models[0].names()) == ["tiny", "tiny:latest"]


def test_modelfile_based_on_a_stored_model_uses_its_file(tmp_path: Path) -> None:
    (tmp_path / "mario.Modelfile").write_text("FROM tiny\nPARAMETER num_ctx 64")
    result = run("ollama", store(tmp_path), tmp_path / "mario.Modelfile")
    tiny, mario = parse_documents([("out", result.stdout)]).models
    assert (mario.name, mario.spec.artifact) == ("mario", tiny.spec.artifact)


def test_missing_ollama_blob_error_names_the_file(tmp_path: Path) -> None:
    folder = store(tmp_path)
    (folder / "models" / "blobs" / "sha256-bb").unlink()
    result = run("ollama", folder)
    assert result.exit_code == 2
    assert result.stderr.endswith("blobs/sha256-bb: No such file or directory\n")
