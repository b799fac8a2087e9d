"""GGUF files, folders, documents and stored keys become one set of Documents, or one line reports the error."""

from __future__ import annotations

import os
from pathlib import Path

import click
import pytest

from autoscaler.contract import ModelName
from autoscaler.documents.document_rules import check_name
from autoscaler.documents.document_types import Documents
from autoscaler.documents.parse import parse_documents
from autoscaler.documents.render import to_yaml
from autoscaler.engines import EngineError
from autoscaler.spec.model import Model
from autoscaler.spec.settings import Settings
from autoscaler.state.events import FaultSeen
from loadtest import tiny_gguf
from pilotlight.cli import keys
from pilotlight.models import document_loading as inputs
from pilotlight.models.document_loading import (
    KEYS_FILE,
    RENAME,
    build_launcher,
    gather_documents,
    model_name,
    read_documents,
)
from pilotlight.models.model_memory import Known
from pilotlight.processes.serve_options import needs_tenant
from tests.support.builders.other_ggufs import make_projector
from tests.support.builders.tiny_adapter import make_adapter
from tests.support.harness.faults.fault_injection import InjectedError, concerns, inject

HEAD = "apiVersion: pilotlight.dev/v1alpha1\n"
ACME = HEAD + "kind: Tenant\nmetadata: {name: acme}\nspec: {models: [ada], keys: [{sha256: '" + "a" * 64 + "'}]}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    for name in ("ada", "bob"):
        tiny_gguf.make_model(tmp_path / "models" / f"{name}.gguf", "one two three", context_tokens=512)
    return tmp_path


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def wrong(folder: Path, *paths: Path, configs: tuple[Path, ...] = ()) -> str:
    """The one-line error for these files."""
    with pytest.raises(click.UsageError) as caught:
        gather_documents(paths, configs, folder / "state")
    assert "\n" not in caught.value.message
    return caught.value.message


def test_gguf_file_becomes_a_model_named_by_its_stem(folder: Path) -> None:
    (model,) = gather_documents([folder / "models" / "ada.gguf"], [], folder).models
    assert (model.name, model.spec.engine, model.spec.context_tokens) == ("ada", "llama.cpp", 512)
    assert model.spec.artifact == f"file://{folder}/models/ada.gguf"
    assert model.memory_bytes > (folder / "models" / "ada.gguf").stat().st_size


def test_default_model_that_is_no_model_name_or_alias_is_rejected(folder: Path) -> None:
    """A Model of a weights file counts too."""

    def config(name: str) -> Path:
        head = "apiVersion: pilotlight.dev/v1alpha1\n"
        spec = "{engine: command, command: [x, '{port}'], aliases: [My LLM (a)]}"
        model = f"{head}kind: Model\nmetadata: {{name: m}}\nspec: {spec}\n"
        return written(folder / "s.yaml", f"{model}---\n{head}kind: Settings\ndefaultModel: {name}\n")

    paths = [folder / "models" / "ada.gguf"]
    for name in ("ada", "m", "My LLM (a)"):
        assert gather_documents(paths, [config(name)], folder).settings.default_model == name
    for name in ("bob", "ADA"):
        message = wrong(folder, *paths, configs=(config(name),))
        assert message.startswith(f"Settings: defaultModel: no Model has the name or alias `{name}`; ")


def test_directory_of_gguf_files_yields_models_in_name_order(folder: Path) -> None:
    (folder / "models" / "notes.txt").write_text("not a model")
    models = gather_documents([folder / "models"], [], folder).models
    assert [(model.name, model.order) for model in models] == [("ada", 0), ("bob", 1)]


def test_documents_written_as_yaml_are_read_back_unchanged(folder: Path) -> None:
    documents = gather_documents([folder / "models"], [written(folder / "t.yaml", ACME)], folder)
    path = written(folder / "documents.yaml", to_yaml(documents))
    again = read_documents(path)
    assert [(m.name, m.memory_bytes, m.slots, m.spec) for m in again.models] == [
        (m.name, m.memory_bytes, m.slots, m.spec) for m in documents.models
    ]
    assert again.tenants == documents.tenants


def test_reloaded_model_keeps_its_creation_time(folder: Path) -> None:
    path = written(folder / "d.yaml", to_yaml(gather_documents([folder / "models"], [], folder)))
    ada, bob = read_documents(path).models
    old = {ada.name: parse_documents([("x", path.read_text())]).models[0]}  # created at 0
    known, new = read_documents(path, old).models
    assert known.created_unix_s == 0
    assert new.created_unix_s >= bob.created_unix_s > 0


def test_exception_in_the_memory_estimate_of_a_model_keeps_all_models(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(folder / "d.yaml", to_yaml(gather_documents([folder / "models"], [], folder)))
    fill = inputs.fill_memory_estimate

    def broken(model: Model, known: Known | None = None, *, gpus: bool = False) -> Model:
        if model.name == "ada":
            raise KeyError("a key that the header lacks")
        return fill(model, known, gpus=gpus)

    monkeypatch.setattr(inputs, "fill_memory_estimate", broken)
    faults = list[FaultSeen]()
    ada, bob = read_documents(path, fault=faults.append).models
    assert (ada.name, bob.name) == ("ada", "bob")
    assert [one.model for one in faults] == ["ada"]
    assert "KeyError" in faults[0].reason
    assert [model.name for model in gather_documents([folder / "models"], [], folder).models] == ["ada", "bob"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.gguf", None, "missing.gguf: No such file or directory"),
        ("broken.gguf", b"GGUF", "broken.gguf: "),
        ("text.gguf", b"hello there", "text.gguf: not a GGUF file"),
    ],
)
def test_invalid_model_file_error_names_the_file(folder: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (folder / name).write_bytes(content)
    assert message in wrong(folder, folder / name)


def test_registry_reference_on_the_command_line_is_rejected(folder: Path) -> None:
    message = wrong(folder, Path("oci://r.example/a:1"))
    assert message == "oci://r.example/a:1: not a file: set it as spec.artifact of a Model in a document (`-c`)"


def test_unreadable_path_is_a_one_line_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = folder / ("a" * 300 + ".gguf")
    assert wrong(folder, long) == f"{long}: File name too long"
    assert "File name too long" in wrong(folder, configs=(folder / ("a" * 300 + ".yaml"),))

    def refused(_: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_dir", refused)
    assert wrong(folder, folder / "x.gguf") == f"{folder}/x.gguf: Permission denied"


def test_duplicate_model_name_error_names_both_files(folder: Path) -> None:
    ada, other = folder / "models" / "ada.gguf", folder / "other" / "ada.gguf"
    other.parent.mkdir()
    other.hardlink_to(ada)
    assert wrong(folder, ada.parent, other) == f"{other}: a Model named ada is already created from {ada}: rename one"


def left_out(capfd: pytest.CaptureFixture[str]) -> dict[str, str]:
    """The files that were left out, with their reasons, each from one line on standard error."""
    lines = capfd.readouterr().err.splitlines()
    return dict(line.removeprefix("pilotlight: ").split(": left out: ", 1) for line in lines)


def test_second_file_with_the_same_normalized_name_creates_no_model(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    one, two = folder / "models" / "my model.gguf", folder / "models" / "my-model.gguf"
    one.hardlink_to(folder / "models" / "ada.gguf")
    two.hardlink_to(folder / "models" / "ada.gguf")
    names = [model.name for model in gather_documents([folder / "models"], [], folder).models]
    assert names == ["ada", "bob", "my-model"]
    assert left_out(capfd) == {str(two): f"a Model named my-model is already created from {one}: rename one"}
    assert wrong(folder, one, two) == f"{two}: a Model named my-model is already created from {one}: rename one"


def test_nested_folder_with_an_unusable_file_serves_its_other_models(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    repo = folder / "models" / "publisher" / "repo"
    repo.mkdir(parents=True)
    (repo / "cat.gguf").hardlink_to(folder / "models" / "ada.gguf")
    (repo / "empty.gguf").touch()
    other = written(folder / "t.yaml", ACME)
    documents = gather_documents([folder / "models"], [other], folder)
    assert [(model.name, model.spec.artifact) for model in documents.models] == [
        (name, f"file://{folder}/models/{path}.gguf")
        for name, path in (("ada", "ada"), ("bob", "bob"), ("cat", "publisher/repo/cat"))
    ]
    assert left_out(capfd) == {f"{repo}/empty.gguf": "the file is empty"}
    assert [tenant.name for tenant in documents.tenants] == ["acme"]


def test_folder_file_named_like_a_model_or_alias_creates_no_model(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spec = "{engine: command, command: ['x', '{port}'], aliases: [bob]}"
    other = written(folder / "x.yaml", HEAD + f"kind: Model\nmetadata: {{name: ada}}\nspec: {spec}\n")
    (model,) = gather_documents([folder / "models"], [other], folder).models
    assert model.spec.engine == "command"
    assert left_out(capfd) == {
        f"{folder}/models/ada.gguf": "a Model named ada is already in the documents: rename one",
        f"{folder}/models/bob.gguf": f"Model bob: metadata.name: `bob` is already an alias of Model ada in {other}",
    }


def test_model_file_whose_path_is_not_utf8_creates_no_model(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    odd = Path(os.fsdecode(bytes(folder / "models") + b"/a\xff.gguf"))
    odd.hardlink_to(folder / "models" / "ada.gguf")
    assert [model.name for model in gather_documents([folder / "models"], [], folder).models] == ["ada", "bob"]
    assert "unpaired surrogate" in capfd.readouterr().err


def test_reload_skips_an_unusable_named_file_but_fails_without_any_model(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ada, bob = folder / "models" / "ada.gguf", folder / "models" / "bob.gguf"
    ada.write_bytes(ada.read_bytes()[:1000])
    assert "ada.gguf: truncated" in wrong(folder, ada, bob)
    (model,) = gather_documents([ada, bob], [], folder, in_force=Documents()).models
    assert model.name == "bob"
    assert left_out(capfd)[str(ada)].startswith("truncated")
    with pytest.raises(click.UsageError, match=r"ada\.gguf: truncated"):
        gather_documents([ada], [], folder, in_force=Documents())


def test_reload_skips_a_missing_folder_and_prints_the_reason(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    gone, other = folder / "gone", folder / "models"
    assert wrong(folder, gone, other) == f"{gone}: No such file or directory"
    assert len(gather_documents([gone, other], [], folder, in_force=Documents()).models) == 2
    assert left_out(capfd) == {str(gone): "No such file or directory"}


def test_references_in_documents_are_resolved_from_environment_and_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = written(folder / "token", "s3cr3t\n")
    monkeypatch.setenv("CODE", "x")
    spec = f"{{engine: command, command: ['${{CODE}}', '{{port}}'], env: {{T: 'file:{secret}'}}}}"
    other = written(folder / "x.yaml", HEAD + f"kind: Model\nmetadata: {{name: x}}\nspec: {spec}\n")
    documents = gather_documents([], [other], folder)
    assert (documents.models[0].spec.command[0], documents.models[0].spec.env) == ("x", {"T": "s3cr3t"})
    assert read_documents(written(folder / "d.yaml", to_yaml(documents))).models[0].spec == documents.models[0].spec
    secret.write_bytes(b"a" * (inputs.VALUE_BYTES_MAX + 1))
    assert wrong(folder, configs=(other,)) == f"{other}: Model x: spec.env.T: file:{secret}: more than 128 KiB"
    secret.write_bytes(b"\xff")
    assert wrong(folder, configs=(other,)) == f"{other}: Model x: spec.env.T: file:{secret}: not UTF-8"


def test_dollar_braces_in_a_model_file_path_are_not_resolved(folder: Path) -> None:
    odd = folder / "models" / "${HOME}.gguf"
    odd.hardlink_to(folder / "models" / "ada.gguf")
    documents = gather_documents([odd], [], folder)
    assert [(model.name, model.spec.artifact) for model in documents.models] == [("HOME", f"file://{odd}")]
    printed = written(folder / "printed.yaml", to_yaml(documents, with_references=True))
    assert gather_documents([], [printed], folder).models[0].spec == documents.models[0].spec


def test_split_model_of_symbolic_links_keeps_its_part_file_names(folder: Path) -> None:
    blobs, snapshot = folder / "hub" / "blobs", folder / "hub" / "snapshots" / "1f2e"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for part, digest in ((1, "aa"), (2, "bb")):
        (blobs / digest).hardlink_to(folder / "models" / "ada.gguf")
        (snapshot / f"x-0000{part}-of-00002.gguf").symlink_to(f"../../blobs/{digest}")
    (snapshot / "y.gguf").symlink_to("../../blobs/aa")
    x, y = gather_documents([folder / "hub"], [], folder).models
    assert (x.name, x.spec.artifact) == ("x", f"file://{snapshot}/x-00001-of-00002.gguf")
    assert (y.name, y.spec.artifact) == ("y", f"file://{blobs}/aa")
    assert x.memory_bytes > y.memory_bytes > 0
    assert f"{snapshot}/x-00001-of-00002.gguf" in build_launcher()(x, "127.0.0.1", 1).argv


def test_vision_projector_in_a_folder_is_passed_to_engine_and_adds_memory(folder: Path) -> None:
    plain, _ = gather_documents([folder / "models"], [], folder).models
    projector = make_projector(folder / "models" / "mmproj-ada-F16.gguf")
    ada, bob = gather_documents([folder / "models"], [], folder).models
    assert (ada.spec.args, bob.spec.args) == (("--mmproj", str(projector)), ())
    assert ada.memory_bytes == plain.memory_bytes + projector.stat().st_size
    argv = build_launcher()(ada, "127.0.0.1", 1).argv
    assert argv[argv.index("--mmproj") + 1] == str(projector)
    assert wrong(folder, projector).startswith(f"{projector}: a vision projector whose name matches no model")


def test_gguf_file_named_like_a_model_of_a_document_is_rejected(folder: Path) -> None:
    spec = "{engine: command, command: ['x', '{port}']}"
    other = written(folder / "x.yaml", HEAD + f"kind: Model\nmetadata: {{name: ada}}\nspec: {spec}\n")
    ada = folder / "models" / "ada.gguf"
    assert wrong(folder, ada, configs=(other,)) == f"{ada}: a Model named ada is already in the documents: rename one"


@pytest.mark.parametrize(
    ("stem", "name"),
    [
        ("llama-3.1-8B_Q4", "llama-3.1-8B_Q4"),
        ("my model", "my-model"),
        ("my  model (v2)", "my-model-v2"),
        ("[org] a+b", "org-a-b"),
        ("_hidden-", "hidden"),
        ("modèle", "mod-le"),
        ("my model-00001-of-00003", "my-model"),
        ("a" * 252 + " b", "a" * 252),
        ("日本", ""),
    ],
)
def test_file_stem_is_normalized_to_a_valid_model_name_or_an_empty_text(stem: str, name: str) -> None:
    assert model_name(Path(f"{stem}.gguf")) == name
    if name:
        check_name(name, ())
        assert model_name(Path(f"{name}.gguf")) == name, "a name stays as it is"


def test_file_with_a_space_is_served_under_its_normalized_name(folder: Path) -> None:
    file = folder / "models" / "my model.gguf"
    (folder / "models" / "ada.gguf").rename(file)
    documents = gather_documents([folder / "models"], [], folder)
    assert [(model.name, model.spec.artifact) for model in documents.models][1] == ("my-model", f"file://{file}")
    (_, again) = read_documents(written(folder / "d.yaml", to_yaml(documents))).models
    assert build_launcher()(again, "127.0.0.1", 1).argv


def test_folder_file_without_a_usable_name_creates_no_model(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    odd = folder / "models" / "日本.gguf"
    odd.hardlink_to(folder / "models" / "ada.gguf")
    assert [model.name for model in gather_documents([folder / "models"], [], folder).models] == ["ada", "bob"]
    assert capfd.readouterr().err == f"pilotlight: {odd}: left out: {RENAME}\n"
    assert wrong(folder, odd) == f"{odd}: {RENAME}"


def test_exception_for_one_model_file_omits_only_the_model_of_that_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    inject(monkeypatch, "autoscaler.documents.render:_model_document", concerns("ada"))
    documents = gather_documents([folder / "models"], [], folder, contain=True)
    assert [model.name for model in documents.models] == ["bob"]
    assert f"{folder}/models/ada.gguf: left out: internal error (InjectedError" in capfd.readouterr().err
    with pytest.raises(InjectedError):
        gather_documents([folder / "models"], [], folder)


def test_file_that_raises_an_exception_at_a_reload_keeps_its_model(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    begun = gather_documents([folder / "models"], [], folder, contain=True)
    inject(monkeypatch, "pilotlight.models.model_files:_load", lambda file: file.name == "ada.gguf")
    documents = gather_documents([folder / "models"], [], folder, contain=True, in_force=begun)
    assert {model.name: model.spec for model in documents.models} == {model.name: model.spec for model in begun.models}
    assert f"{folder}/models/ada.gguf: keeps its Model: internal error (InjectedError" in capfd.readouterr().err


def test_removed_document_whose_model_file_raises_is_not_restored(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = f"{{engine: llama.cpp, artifact: 'file://{folder}/models/ada.gguf', tenants: [acme]}}"
    other = written(folder / "x.yaml", HEAD + f"kind: Model\nmetadata: {{name: x}}\nspec: {spec}\n---\n{ACME}")
    begun = gather_documents([folder / "models"], [other], folder, contain=True)
    assert sorted(model.name for model in begun.models) == ["ada", "bob", "x"]
    inject(monkeypatch, "pilotlight.models.model_files:_load", lambda file: file.name == "ada.gguf")
    again = gather_documents([folder / "models"], [], folder, contain=True, in_force=begun)
    assert sorted(model.name for model in again.models) == ["ada", "bob"]


def test_unknown_default_model_from_a_reference_is_shown_as_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("S", "s3cr3t")
    settings = written(folder / "s.yaml", HEAD + "kind: Settings\ndefaultModel: '${S}'\n")
    message = wrong(folder, folder / "models", configs=(settings,))
    assert "no Model has the name or alias `${S}`;" in message
    assert "s3cr3t" not in message


def test_symbolic_link_to_itself_creates_no_model(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "models" / "loop.gguf").symlink_to("loop.gguf")
    begun = gather_documents([folder / "models"], [], folder, contain=True)
    again = gather_documents([folder / "models"], [], folder, contain=True, in_force=begun)
    assert [model.name for model in again.models] == ["ada", "bob"]
    assert f"{folder}/models/loop.gguf: left out: " in capfd.readouterr().err


def test_gguf_file_named_like_an_alias_of_a_model_is_rejected(folder: Path) -> None:
    spec = "{engine: command, command: ['x', '{port}'], aliases: [ada]}"
    other = written(folder / "x.yaml", HEAD + f"kind: Model\nmetadata: {{name: x}}\nspec: {spec}\n")
    ada = folder / "models" / "ada.gguf"
    message = wrong(folder, ada, configs=(other,))
    assert message == f"{ada}: Model ada: metadata.name: `ada` is already an alias of Model x in {other}"


def test_document_passed_as_a_model_file_suggests_the_config_option(folder: Path) -> None:
    two = written(folder / "two.yaml", ACME)
    assert wrong(folder, two) == f"{two}: not a GGUF file; documents are given with `-c {two}`"


def test_directory_without_gguf_files_is_rejected(folder: Path) -> None:
    (folder / "empty").mkdir()
    assert wrong(folder, folder / "empty") == f"{folder}/empty: no .gguf file in this folder"


def test_unreadable_document_error_names_the_file(folder: Path) -> None:
    assert wrong(folder, configs=(folder / "none.yaml",)) == f"{folder}/none.yaml: No such file or directory"
    (folder / "odd.yaml").write_bytes(b"\xff\xfe\xfd")
    assert wrong(folder, configs=(folder / "odd.yaml",)) == f"{folder}/odd.yaml: not UTF-8"
    assert "unknown" in wrong(folder, configs=(written(folder / "k.yaml", ACME + "x: 1\n"),)).lower()


def test_model_of_a_missing_file_has_no_memory_estimate_and_no_launch(folder: Path) -> None:
    spec = f"{{engine: llama.cpp, artifact: 'file://{folder}/later.gguf'}}"
    path = written(folder / "d.yaml", HEAD + f"kind: Model\nmetadata: {{name: later}}\nspec: {spec}\n")
    (model,) = read_documents(path).models
    assert model.memory_bytes == 0
    with pytest.raises((EngineError, OSError, ValueError), match=r"later\.gguf"):
        build_launcher()(model, "127.0.0.1", 1)


def test_model_memory_and_command_are_known_before_its_adapter_is_fetched(folder: Path) -> None:
    spec = f"{{engine: llama.cpp, artifact: 'file://{folder}/models/ada.gguf', adapters: [{{name: x, artifact: 'oci://r.io/x:1'}}]}}"
    path = written(folder / "d.yaml", HEAD + f"kind: Model\nmetadata: {{name: ada}}\nspec: {spec}\n")
    (found,) = read_documents(path).models
    assert found.memory_bytes > 0, "its own weights say it"
    assert "/weights:0" in build_launcher()(found, "127.0.0.1", 1).argv


def test_adapters_add_memory_and_a_missing_one_fails_the_start(folder: Path) -> None:
    make_adapter(folder / "a.gguf", "one two three", "one three")
    files = (folder / "models" / "ada.gguf", folder / "a.gguf", folder / "gone.gguf")

    def memory_bytes(*adapters: Path) -> int:
        rows = ", ".join(f"{{name: a{n}, artifact: 'file://{path}'}}" for n, path in enumerate(adapters))
        spec = f"{{engine: llama.cpp, artifact: 'file://{files[0]}', adapters: [{rows}]}}"
        path = written(folder / "d.yaml", HEAD + f"kind: Model\nmetadata: {{name: ada}}\nspec: {spec}\n")
        return read_documents(path).models[0].memory_bytes

    assert memory_bytes(files[1]) == memory_bytes() + files[1].stat().st_size
    assert memory_bytes(files[1], folder / ("a" * 300)) == 0, "a name that no disk takes"
    with pytest.raises(EngineError, match=r"^Model ada: adapter .*aaa does not exist"):
        build_launcher()(read_documents(folder / "d.yaml").models[0], "127.0.0.1", 1)
    assert memory_bytes(*files[1:]) == 0
    with pytest.raises(EngineError, match=r"^Model ada: adapter .*/gone\.gguf does not exist"):
        build_launcher()(read_documents(folder / "d.yaml").models[0], "127.0.0.1", 1)


# --- stored keys ------------------------------------------------------------------------------------------------------


def test_a_stored_key_is_added_to_the_tenant_of_the_documents(folder: Path) -> None:
    _, entry = keys.generate_key("tenant", "ci")
    keys.store_key(folder, "acme", entry)
    (acme,) = gather_documents([], [written(folder / "t.yaml", ACME)], folder).tenants
    assert [key.sha256 for key in acme.spec.keys] == ["a" * 64, entry.sha256]
    assert acme.spec.models == ("ada",), "what the document allows stays as it is"


def test_stored_key_without_tenant_document_creates_the_tenant(folder: Path) -> None:
    keys.store_key(folder, "lab", keys.generate_key("tenant", "x")[1])
    tenants = gather_documents([], [written(folder / "t.yaml", ACME)], folder).tenants
    assert [(tenant.name, len(tenant.spec.keys)) for tenant in tenants] == [("acme", 1), ("lab", 1)]


def test_key_in_both_document_and_key_file_is_listed_once(folder: Path) -> None:
    _, entry = keys.generate_key("tenant", "ci")
    keys.store_key(folder, "acme", entry)
    pasted = ACME.replace("a" * 64, entry.sha256)
    (acme,) = gather_documents([], [written(folder / "t.yaml", pasted)], folder).tenants
    assert [key.sha256 for key in acme.spec.keys] == [entry.sha256]


def test_key_of_two_tenants_is_rejected(folder: Path) -> None:
    _, entry = keys.generate_key("tenant", "ci")
    (folder / "state").mkdir()
    keys.store_key(folder / "state", "lab", entry)
    pasted = written(folder / "t.yaml", ACME.replace("a" * 64, entry.sha256))
    assert wrong(folder, configs=(pasted,)).endswith(f"{KEYS_FILE}: Tenant lab: a key already belongs to Tenant acme")


@pytest.mark.parametrize(
    ("auth", "tenants", "loopback", "refused"),
    [
        ("auto", 0, True, False),
        ("auto", 0, False, True),
        ("auto", 1, False, False),
        ("none", 0, False, False),
        ("keys", 0, False, False),
    ],
)
def test_non_loopback_listener_with_auto_auth_requires_a_tenant(
    auth: str, tenants: int, loopback: bool, refused: bool
) -> None:
    with_tenants = parse_documents([("t", ACME)]).tenants[:tenants]
    documents = Documents(
        tenants=with_tenants, settings=parse_documents([("s", HEAD + f"kind: Settings\nauth: {auth}\n")]).settings
    )
    assert needs_tenant(documents, loopback=loopback) is refused
    assert isinstance(documents.settings, Settings)


def test_a_header_is_read_again_when_the_file_changed(folder: Path) -> None:
    path = written(folder / "d.yaml", to_yaml(gather_documents([folder / "models" / "ada.gguf"], [], folder)))
    before = read_documents(path).models[0].memory_bytes
    tiny_gguf.make_model(folder / "models" / "ada.gguf", " ".join(f"word{n}" for n in range(500)), context_tokens=512)
    after = {model.name: model for model in read_documents(path).models}[ModelName("ada")].memory_bytes
    assert after > before
