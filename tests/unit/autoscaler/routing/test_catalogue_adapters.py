"""Adapters: the document, the engine's command line, the catalogue, the names and the request body."""

from __future__ import annotations

import json

import pytest

from autoscaler.contract import (
    AdapterEntry,
    CatalogueDelta,
    FrontSettings,
    ModelEntry,
    ModelName,
    TenantEntry,
    TenantName,
)
from autoscaler.documents.document_rules import ADAPTED_NAMES_MAX, ADAPTED_NAMES_WANTED, ADAPTERS_MAX
from autoscaler.documents.document_types import DocumentError, Documents
from autoscaler.documents.parse import parse_documents
from autoscaler.documents.partial_decoding import read_known_keys
from autoscaler.documents.render import to_yaml
from autoscaler.engines import build_launch_command
from autoscaler.engines.command_line import LAUNCHER
from autoscaler.engines.programs.xllamacpp_server import parse_flags
from autoscaler.routing.catalogue import model_entry
from autoscaler.spec.model import Adapter, EngineName, Model, ModelSpec
from autoscaler.spec.pod import API_VERSION
from gateway.errors import CallError, model_not_found
from gateway.http.body_buffers import ChunkedBody
from gateway.request.api_routes import Operation, find_operation
from gateway.request.auth import Directory
from gateway.request.body_members import edit_body, read_body
from tests.support.net.upstream_requests import in_one

TWO = (Adapter(name="support", artifact="file:///w/s"), Adapter(name="sql.v2", artifact="file:///w/q"))
TOO_MANY = [f"{{name: a{n}, artifact: 'file:///a'}}" for n in range(ADAPTERS_MAX + 1)]
NEEDED = ["--model", "/m", "--host", "h", "--port", "1", "--slots", "2"]


def document(adapters: str, *, name: str = "llama", engine: str = "vllm", rest: str = "") -> str:
    head = f"apiVersion: {API_VERSION}\nkind: Model\nmetadata: {{name: '{name}'}}\n"
    return f"{head}spec: {{engine: {engine}, artifact: 'file:///m', {rest}adapters: {adapters}}}\n"


def loaded(text: str) -> Documents:
    return parse_documents([("a.yaml", text)])


def wrong(*texts: str) -> str:
    with pytest.raises(DocumentError) as caught:
        parse_documents([(f"{number}.yaml", text) for number, text in enumerate(texts)])
    return str(caught.value)


def model(engine: EngineName, *, aliases: tuple[str, ...] = (), args: tuple[str, ...] = ()) -> Model:
    spec = ModelSpec(
        engine=engine, artifact="file:///m", aliases=aliases, adapters=TWO, args=args, command=("run", "{port}")
    )
    return Model(name=ModelName("llama"), spec=spec, slots=8)


def words(engine: EngineName, program: str, *args: str) -> list[str]:
    """The command line of a Model with these arguments."""
    started = build_launch_command(
        model(engine, args=args), None, "127.0.0.1", 9000, {program: f"/bin/{program}"} if program else {}
    )
    return list(started.argv)


# --- the document ----------------------------------------------------------------------------------------------------


def test_document_with_adapters_survives_a_yaml_round_trip() -> None:
    text = document("[{name: support, artifact: 'file:///w/s'}, {name: sql.v2, artifact: 'file:///w/q'}]")
    documents = loaded(text)
    assert documents.models[0].spec.adapters == TWO
    assert loaded(to_yaml(documents)) == documents


def test_added_or_changed_adapter_changes_the_spec_hash() -> None:
    texts = ("[{name: a, artifact: 'file:///a'}]", "[{name: a, artifact: 'file:///b'}]", "[]")
    assert len({loaded(document(text)).models[0].spec_hash() for text in texts}) == 3


@pytest.mark.parametrize(
    ("adapters", "line"),
    [
        ("[{name: 'a:b', artifact: 'file:///a'}]", "spec.adapters[0].name: expected 1 to 63 letters, digits or ._-"),
        ("[{name: 'a/b', artifact: 'file:///a'}]", "spec.adapters[0].name: expected 1 to 63 letters"),
        ("[{name: '', artifact: 'file:///a'}]", "spec.adapters[0].name: expected 1 to 63 letters"),
        ("[{name: -a, artifact: 'file:///a'}]", "spec.adapters[0].name: expected 1 to 63 letters"),
        (f"[{{name: {'a' * 64}, artifact: 'file:///a'}}]", "spec.adapters[0].name: expected 1 to 63 letters"),
        (
            "[{name: a, artifact: 'file:///a'}, {name: a, artifact: 'file:///b'}]",
            "spec.adapters[1].name: `a` occurs twice",
        ),
        ("[{name: a}]", "spec.adapters[0].artifact: missing"),
        ("[{name: a, artifact: 'file:///a', rank: 8}]", "spec.adapters[0].rank: unknown key"),
        (
            "[{name: a, artifact: 'oci://r.io/a@sha256:0'}]",
            "spec.adapters[0].artifact: expected oci://registry/repository:tag",
        ),
        ("[{name: a, artifact: 'hf://org/a/b'}]", "spec.adapters[0].artifact: expected hf://org/name@revision"),
        ("[{name: a, artifact: 'pvc://a/b'}]", "spec.adapters[0].artifact: pvc:// is not supported yet"),
        ("[{name: a, artifact: 's3://a/b'}]", "spec.adapters[0].artifact: expected s3://bucket/key"),
        ("[{name: a, artifact: /a}]", "spec.adapters[0].artifact: expected an absolute path such as file:///models/"),
        ("[{name: a, artifact: 'file:///a,b'}]", "an equals sign or a double quote is not allowed in the path"),
        ("[{name: a, artifact: 'file:///a=b'}]", "an equals sign or a double quote is not allowed in the path"),
        ("[{name: a, artifact: 'file:///a:1'}]", "an equals sign or a double quote is not allowed in the path"),
        ("x", "spec.adapters: expected a list"),
        (f"[{', '.join(TOO_MANY)}]", f"at most {ADAPTERS_MAX}"),
    ],
)
def test_invalid_adapter_is_rejected_with_its_key(adapters: str, line: str) -> None:
    assert line in wrong(document(adapters))


def test_model_name_equal_to_an_adapter_name_is_rejected() -> None:
    """Names of Models may contain colons too."""
    adapted = document("[{name: b, artifact: 'file:///b'}]", name="m", rest="aliases: [n], ")
    for taken in ("m:b", "n:b"):
        message = f"metadata.name: `{taken}` is already an adapter of Model m in 0.yaml"
        assert message in wrong(adapted, document("[]", name=taken))
        assert f"spec.adapters: `{taken}` is already the name of a Model" in wrong(document("[]", name=taken), adapted)


def test_too_many_names_of_adapters_are_rejected_with_their_key() -> None:
    adapters = ", ".join(f"{{name: a{n}, artifact: 'file:///a'}}" for n in range(ADAPTERS_MAX))
    aliases = [f"n{number}" for number in range(ADAPTED_NAMES_MAX // ADAPTERS_MAX)]
    loaded(document(f"[{adapters}]", rest=f"aliases: [{', '.join(aliases[1:])}], "))
    text = document(f"[{adapters}]", rest=f"aliases: [{', '.join(aliases)}], ")
    assert f"spec.adapters: {ADAPTED_NAMES_WANTED}" in wrong(text)
    spec = {"engine": "vllm", "aliases": aliases, "adapters": [{"name": f"a{n}"} for n in range(ADAPTERS_MAX)]}
    known = read_known_keys({"metadata": {"name": "llama"}, "spec": spec})
    assert (len(known.aliases), known.adapters) == (len(aliases), ())


def test_adapters_are_rejected_for_an_engine_without_adapter_support() -> None:
    assert "spec.adapters: engine ollama does not support adapters" in wrong(
        document("[{name: a, artifact: 'file:///a'}]", engine="ollama")
    )


@pytest.mark.parametrize("arg", ["--cache-ram=100", "--cache_ram", "--lora", "--lora-scaled=/x:1"])
def test_llama_cpp_flags_that_conflict_with_adapters_are_rejected(arg: str) -> None:
    one = "[{name: a, artifact: 'file:///a'}]"
    message = wrong(document(one, engine="llama.cpp", rest=f"args: ['{arg}', '100'], "))
    assert "spec.args[0]: not allowed with spec.adapters" in message
    assert loaded(document("[]", engine="llama.cpp", rest=f"args: ['{arg}', '100'], ")).models


def test_model_name_with_a_colon_is_rejected_for_sglang() -> None:
    """SGLang would take the part after the colon for an adapter, and fail to start."""
    assert "metadata.name: engine sglang does not support a name with `:`" in wrong(
        document("[]", name="qwen:7b", engine="sglang")
    )
    assert loaded(document("[]", name="qwen", engine="sglang", rest="aliases: ['qwen:7b'], ")).models
    assert loaded(document("[]", name="qwen:7b")).models


# --- engines ---------------------------------------------------------------------------------------------------------


def test_adapters_become_engine_flags_before_the_user_args() -> None:
    assert words("vllm", "vllm", "--max-lora-rank=64")[-5:] == [
        *("--enable-lora", "--lora-modules", "llama:support=/w/s", "llama:sql.v2=/w/q", "--max-lora-rank=64")
    ]
    assert words("sglang", "sglang")[-4:] == ["--enable-lora", "--lora-paths", "support=/w/s", "sql.v2=/w/q"]
    for program in ("llama-server", "xllamacpp"):
        argv = words("llama.cpp", program, "--threads=1")
        assert argv[-5:] == ["--cache-ram", "0", "--lora-scaled", "/w/s:0,/w/q:0", "--threads=1"]
    assert words("command", "") == ["run", "9000"], "whose own words load them"


def test_launch_command_without_adapters_has_no_adapter_flags() -> None:
    plain = Model(name=ModelName("m"), spec=ModelSpec(engine="vllm", artifact="file:///m"))
    assert "--enable-lora" not in build_launch_command(plain, None, "h", 1, {"vllm": "/bin/vllm"}).argv


def test_launcher_rejects_an_invalid_lora_scaled_value() -> None:
    assert parse_flags([*NEEDED, "--lora-scaled", "/a b:0,/c:1"])["--lora-scaled"] == "/a b:0,/c:1"
    assert "--lora-scaled" not in parse_flags(NEEDED)
    assert LAUNCHER in words("llama.cpp", "xllamacpp")
    for value in ("/a", ":0", "/a:", "/a:x", "/a:0,"):
        with pytest.raises(ValueError, match="--lora-scaled needs PATH:SCALE"):
            parse_flags([*NEEDED, "--lora-scaled", value])


# --- the catalogue ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "names"),
    [
        ("vllm", ("llama:support", "llama:sql.v2")),
        ("sglang", ("llama:support", "llama:sql.v2")),
        ("command", ("support", "sql.v2")),
    ],
)
def test_model_entry_contains_the_served_name_of_each_adapter(engine: EngineName, names: tuple[str, ...]) -> None:
    entry = model_entry(model(engine))
    assert entry.adapters == (
        AdapterEntry(name="support", served_name=names[0]),
        AdapterEntry(name="sql.v2", served_name=names[1]),
    )
    assert not entry.lora


def test_each_entry_of_a_llama_cpp_model_with_adapters_sets_lora_scales() -> None:
    """Otherwise llama.cpp may answer from results that it computed with the adapter of the previous request."""
    entry = model_entry(model("llama.cpp"))
    assert json.loads(entry.lora) == [{"id": 0, "scale": 0}]
    assert [json.loads(adapter.lora) for adapter in entry.adapters] == [
        [{"id": 0, "scale": 1}],
        [{"id": 1, "scale": 1}],
    ]
    plain = Model(name=ModelName("m"), spec=ModelSpec(engine="llama.cpp", artifact="file:///m"))
    assert not model_entry(plain).lora


# --- names -----------------------------------------------------------------------------------------------------------


def directory(*entries: ModelEntry) -> Directory:
    made = Directory()
    settings = FrontSettings(keys_needed=True)
    made.apply(CatalogueDelta(epoch=1, version=1, full=True, models=entries, settings=settings))
    return made


def tenant(*models: str) -> TenantEntry:
    return TenantEntry(name=TenantName("acme"), models=models or None)


@pytest.mark.parametrize("base", ["llama", "gpt"])
def test_adapter_name_resolves_to_its_model_with_its_own_served_name(base: str) -> None:
    entry = model_entry(model("llama.cpp", aliases=("gpt",)))
    found = directory(entry).names.resolve(tenant(), f"{base}:sql.v2")
    assert (found.name, found.served_name, found.lora) == ("llama", "llama:sql.v2", entry.adapters[1].lora)
    assert (found.queue, found.clocks, found.slots) == (entry.queue, entry.clocks, entry.slots)


@pytest.mark.parametrize(
    "name", ["llama:", "llama:none", "llama:SUPPORT", "support", ":support", "llama:support:support", "other:support"]
)
def test_unknown_adapter_is_rejected_as_an_unknown_model(name: str) -> None:
    with pytest.raises(CallError) as caught:
        directory(model_entry(model("vllm"))).names.resolve(tenant(), name)
    assert caught.value == model_not_found()


def test_adapter_access_follows_the_permission_for_its_model() -> None:
    entry = model_entry(model("vllm"))
    assert directory(entry).names.resolve(tenant("lla*"), "llama:support").served_name == "llama:support"
    for glob in ("qwen", "llama:support", "*:support"):
        with pytest.raises(CallError) as caught:
            directory(entry).names.resolve(tenant(glob), "llama:support")
        assert caught.value == model_not_found(), "the same as for one that does not exist"


# --- the body --------------------------------------------------------------------------------------------------------


def operation(path: str) -> Operation:
    found = find_operation(b"POST", path.encode())
    assert found is not None
    return found


def sent(path: str, body: bytes, lora: str, *, large: bool = False) -> dict[str, object]:
    """The JSON body that an engine receives."""
    given: bytes | ChunkedBody = body
    if large:
        given = ChunkedBody()
        given.add(body)
    of = operation(path)
    out = edit_body(of, read_body(of, given, b"application/json"), "llama:support", None, lora)
    members: dict[str, object] = json.loads(in_one(out))
    return members


LORA = '[{"id":1,"scale":1}]'


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_adapter_selection_is_added_to_small_and_large_bodies(path: str, *, large: bool) -> None:
    got = sent(path, b'{"model":"gpt:support","input":"x"}', LORA, large=large)
    assert got == {"model": "llama:support", "input": "x", "lora": [{"id": 1, "scale": 1}]}
    assert "lora" not in sent(path, b'{"model":"gpt:support","input":"x"}', "", large=large)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/messages", "/v1/audio/speech", "/v1/images/generations"])
def test_adapter_on_a_path_without_adapter_support_is_rejected_with_400(path: str) -> None:
    with pytest.raises(CallError) as caught:
        sent(path, b'{"model":"llama"}', LORA)
    assert (caught.value.status, caught.value.param) == (400, "model")
    assert "adapters" in caught.value.message


def test_form_body_with_an_adapter_selection_is_rejected() -> None:
    of = operation("/v1/audio/transcriptions")
    form = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nllama\r\n--b--'
    peek = read_body(of, form, b"multipart/form-data; boundary=b")
    with pytest.raises(CallError):
        edit_body(of, peek, "llama:support", None, LORA)
    assert edit_body(of, peek, "llama:support") == form.replace(b"\r\nllama\r\n", b"\r\nllama:support\r\n")


@pytest.mark.parametrize("large", [False, True])
def test_client_supplied_lora_field_is_rejected_with_400(*, large: bool) -> None:
    with pytest.raises(CallError) as caught:
        sent("/v1/chat/completions", b'{"model":"llama","lora":[{"id":0,"scale":1}]}', LORA, large=large)
    assert (caught.value.status, caught.value.param) == (400, "lora")
    assert "model:adapter" in caught.value.message
