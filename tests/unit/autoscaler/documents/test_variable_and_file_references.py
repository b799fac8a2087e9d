"""References in documents become values of variables and files before validation, and are printed as written."""

from __future__ import annotations

import pytest

from autoscaler.documents.document_types import DocumentError, Documents
from autoscaler.documents.parse import parse_documents
from autoscaler.documents.render import to_yaml
from autoscaler.documents.variable_and_file_references import VALUES_CHARS_MAX

HEAD = "apiVersion: pilotlight.dev/v1alpha1\n"
SECRET = "s3cr3t-value"
ENVIRON = {
    "TOKEN": SECRET,
    "LABEL": f"{SECRET} /",
    "EMPTY": "",
    "FOLDER": "/models",
    "BRACES": "${TOKEN}",
    "BYTES": "a\udcff",
}
FILES = {"/run/token": f"{SECRET}\n", "/run/two": "a\r\n\r\n", "/models/key": "b" * 64 + "\n", "/run/ref": "${TOKEN}"}


def read_file(path: str) -> str:
    if path not in FILES:
        raise ValueError("No such file or directory")
    return FILES[path]


def parse(text: str) -> Documents:
    return parse_documents([("x.yaml", text)], ENVIRON, read_file=read_file)


def model(spec: str) -> str:
    return f"{HEAD}kind: Model\nmetadata: {{name: m}}\nspec: {{engine: command, command: [x, '{{port}}'], {spec}}}\n"


def env(value: str) -> object:
    """The value of a variable of an engine."""
    (one,) = parse(model(f"env: {{X: '{value}'}}")).models
    return one.spec.env["X"]


def wrong(text: str) -> str:
    with pytest.raises(DocumentError) as caught:
        parse(text)
    assert SECRET not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("${TOKEN}", SECRET),
        ("a ${FOLDER}/${TOKEN}!", f"a /models/{SECRET}!"),
        ("${NONE:-x y}", "x y"),
        ("${NONE:-}", ""),
        ("${EMPTY:-x}", "x"),
        ("${EMPTY}", ""),
        ("${TOKEN:-x}", SECRET),
        ("$${TOKEN}", "${TOKEN}"),
        ("$$${TOKEN}", "$${TOKEN}"),
        ("$HOME $(pwd) 5$", "$HOME $(pwd) 5$"),
        ("${BRACES}", "${TOKEN}"),
        ("file:/run/token", SECRET),
        ("file:/run/two", "a\r\n"),
        ("file:${FOLDER}/key", "b" * 64),
        ("file:/run/ref", "${TOKEN}"),
        ("file:///run/token", "file:///run/token"),
        ("${NONE:-file:}/run/token", "file:/run/token"),
    ],
)
def test_reference_in_a_document_is_replaced_by_its_value_only_once(written: str, value: str) -> None:
    assert env(written) == value


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("${NONE}", "the environment variable NONE is not set: set it, or use ${NONE:-default}"),
        ("${}", "expected ${NAME} or ${NAME:-default}; for the text ${ write $${"),
        ("${a.b}", "expected ${NAME} or ${NAME:-default}; for the text ${ write $${"),
        ("x ${TOKEN", "expected ${NAME} or ${NAME:-default}; for the text ${ write $${"),
        ("${TOKEN-x}", "expected ${NAME} or ${NAME:-default}; for the text ${ write $${"),
        ("${BYTES}", "the environment variable BYTES is not UTF-8"),
        ("file:/none", "file:/none: No such file or directory"),
        ("file:token", "file:token: expected file: and an absolute path, such as file:/run/secrets/x"),
        ("file:${TOKEN}", "file:${TOKEN}: expected file: and an absolute path, such as file:/run/secrets/x"),
    ],
)
def test_unresolved_reference_is_an_error_with_its_path(value: str, message: str) -> None:
    assert wrong(model(f"env: {{X: '{value}'}}")) == f"x.yaml: Model m: spec.env.X: {message}"


def test_path_of_an_error_includes_positions_in_lists() -> None:
    assert wrong(model("args: [a, '${NONE}']")).startswith("x.yaml: Model m: spec.args[1]: the environment variable")


def test_variables_expand_in_every_key_but_files_only_in_some_keys() -> None:
    text = (
        f"{HEAD}kind: Tenant\nmetadata: {{name: '${{NONE:-acme}}'}}\nspec: {{keys: [{{sha256: 'file:/models/key'}}]}}\n"
    )
    (tenant,) = parse(text).tenants
    assert (tenant.name, tenant.spec.keys[0].sha256) == ("acme", "b" * 64)
    (one,) = parse(model("args: ['file:/run/token', '${FOLDER}/a'], artifact: 'file://${FOLDER}/a.gguf'")).models
    assert one.spec.args == ("file:/run/token", "/models/a")
    assert one.spec.artifact == "file:///models/a.gguf"
    key = "-----BEGIN PUBLIC KEY-----\nAA==\n-----END PUBLIC KEY-----"
    FILES["/run/key.pem"] = f"{key}\n"
    settings = parse(f"{HEAD}kind: Settings\nweights: {{signatures: {{keys: ['file:/run/key.pem']}}}}\n").settings
    assert settings.weights.signatures.keys == (key,)


def test_error_about_a_referenced_value_does_not_contain_the_value() -> None:
    assert "spec.engine: expected one of" in wrong(model("args: []").replace("engine: command", "engine: '${TOKEN}'"))
    text = f"{HEAD}kind: Tenant\nmetadata: {{name: a}}\nspec: {{keys: [{{sha256: 'file:/run/token'}}]}}\n"
    assert "spec.keys[0].sha256" in wrong(text)


@pytest.mark.parametrize(
    "spec",
    ["near: '${LABEL}'", "spread: '${LABEL}'", "aliases: ['${TOKEN}', '${TOKEN}']", "slots: '${TOKEN}'",
     "adapters: [{name: '${TOKEN}', artifact: /a}, {name: '${TOKEN}', artifact: /b}]", "artifact: 'oci://${TOKEN}'",
     "prompt: '${TOKEN}'", "replicas: {min: 2, max: '${TOKEN}'}", "cacheSalt: '${TOKEN}'"],
)  # fmt: skip
def test_error_for_an_invalid_key_hides_the_value_of_its_reference(spec: str) -> None:
    message = wrong(model(spec))
    assert "x.yaml: Model m: spec." in message


def test_duplicate_name_error_shows_the_reference_and_not_its_value() -> None:
    one = model("aliases: ['${TOKEN}']")
    other = one.replace("name: m", "name: '${TOKEN}'").replace("aliases: ['${TOKEN}']", "args: []")
    assert wrong(f"{one}---\n{other}").endswith("metadata.name: `${TOKEN}` is already an alias of Model m in x.yaml")
    again = f"{other}---\n{one}"
    assert wrong(again).endswith("spec.aliases[0]: `${TOKEN}` is already the name of a Model in x.yaml")
    third = f"{HEAD}kind: Tenant\nmetadata: {{name: '${{TOKEN}}'}}\n"
    assert "`${TOKEN}` is already the name of a Tenant in" in wrong(f"{third}---\n{third}")
    with_alias = other.replace("args: []", "aliases: [y]")
    assert wrong(f"{with_alias}---\n{model('aliases: [y]')}").endswith("already an alias of Model ${TOKEN} in x.yaml")


def test_exception_with_a_referenced_value_shows_the_reference_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(value: object) -> None:
        raise ValueError(f"found {value}")

    monkeypatch.setattr("autoscaler.documents.parse.check_model", lambda spec: fail(spec.env["X"]))
    text = model("env: {X: 'a-${TOKEN}'}")
    found = parse_documents([("x.yaml", text)], ENVIRON, read_file=read_file, contain=True).undecoded
    assert [one.reason.rpartition("found ")[2] for one in found.values()] == ["a-${TOKEN}"]


def test_referenced_values_above_one_million_characters_are_rejected() -> None:
    FILES["/run/large"] = "a" * (VALUES_CHARS_MAX // 2)
    many = ", ".join(f"X{number}: 'file:/run/large'" for number in range(3))
    message = wrong(model(f"env: {{{many}}}"))
    assert "spec.env.X2: the values of all references have more than 1 million characters" in message


def test_yaml_output_has_references_if_requested_and_values_otherwise() -> None:
    spec = (
        "env: {A: '${TOKEN}', B: 'file:/run/token', C: '$${HOME}'}, gpu: {memory: '${NONE:-12Gi}'}, args: ['${TOKEN}']"
    )
    tenant = f"---\n{HEAD}kind: Tenant\nmetadata: {{name: a}}\nspec: {{keys: [{{sha256: 'file:/models/key'}}]}}\n"
    documents = parse(model(spec) + tenant)
    printed = to_yaml(documents, with_references=True)
    assert SECRET not in printed
    assert "b" * 64 not in printed
    assert parse(printed) == documents
    passed_on = parse_documents([("y.yaml", to_yaml(documents))])
    assert (passed_on.models, passed_on.tenants) == (documents.models, documents.tenants)
    assert passed_on.models[0].spec.env == {"A": SECRET, "B": SECRET, "C": "${HOME}"}


def test_references_stay_text_if_documents_are_parsed_without_file_reader() -> None:
    (one,) = parse_documents([("x", model("env: {X: '${TOKEN}'}"))], ENVIRON).models
    assert one.spec.env == {"X": "${TOKEN}"}
