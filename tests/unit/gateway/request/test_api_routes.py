"""Which paths exist on the inference port, and that there are no others."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.request.api_routes import Kind, Operation, find_operation, suggest_path
from tests.support.example_budget import examples

OPENAI = [
    "chat/completions", "completions", "embeddings", "responses", "moderations", "audio/transcriptions",
    "audio/translations", "audio/speech", "images/generations", "images/edits",
]  # fmt: skip
OTHERS = {
    "/v1/messages": "anthropic", "/v1/messages/count_tokens": "anthropic", "/v1/rerank": "jina", "/v2/rerank": "cohere",
    "/v1/score": "score", "/tokenize": "vllm", "/detokenize": "vllm",
}  # fmt: skip
FORMS = {"audio/transcriptions", "audio/translations", "images/edits"}
WITH_USAGE = {"chat/completions", "completions"}
SALTED = WITH_USAGE | {"responses"}


def found(method: str, path: str) -> Operation:
    operation = find_operation(method.encode(), path.encode())
    assert operation is not None, path
    return operation


@pytest.mark.parametrize("name", OPENAI)
@pytest.mark.parametrize("root", ["/v1/", "/openai/v1/", "/openai/deployments/gpt-4o/"])
def test_openai_and_azure_paths_are_mapped_to_v1_paths_of_the_engine(root: str, name: str) -> None:
    operation = found("POST", root + name)
    assert operation == Operation(
        Kind.INFER,
        b"/v1/" + name.encode(),
        "responses" if name == "responses" else "openai",
        multipart=name in FORMS,
        usage=name in WITH_USAGE,
        salted=name in SALTED,
        model="gpt-4o" if "deployments" in root else None,
    )


@pytest.mark.parametrize(("path", "dialect"), OTHERS.items())
def test_path_of_another_api_dialect_is_sent_unchanged_to_the_engine(path: str, dialect: str) -> None:
    operation = found("POST", path)
    assert (operation.kind, operation.engine_path, operation.dialect) == (Kind.INFER, path.encode(), dialect)
    assert not operation.multipart
    assert not operation.usage


@pytest.mark.parametrize("root", ["/v1/models", "/openai/v1/models"])
def test_get_request_on_models_path_lists_models_or_returns_named_model(root: str) -> None:
    assert found("GET", root) == Operation(Kind.LIST_MODELS)
    for name in ("llama-8b", "lab/llama-8b", "llama-8b:support", "org/model@v1.0+x"):
        assert found("GET", f"{root}/{name}") == Operation(Kind.GET_MODEL, model=name)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("lab%2Fllama-8b", "lab/llama-8b"),
        ("lab%2fllama-8b%3asupport", "lab/llama-8b:support"),
        ("%61", "a"),
        ("org/m%40v1", "org/m@v1"),
        ("a%2Fchat%2Fcompletions", "a/chat/completions"),
        ("%41" * 256, "A" * 256),
        ("My%20Model%20(fast)", "My Model (fast)"),
        ("lab/tiny%20%5BQ4_K_M%5D", "lab/tiny [Q4_K_M]"),
        ("[a](b)", "[a](b)"),
    ],
)
def test_model_name_in_path_is_percent_decoded_once(written: str, name: str) -> None:
    for root in ("/v1/models/", "/openai/v1/models/"):
        assert found("GET", root + written) == Operation(Kind.GET_MODEL, model=name)
    deployed = found("POST", f"/openai/deployments/{written}/chat/completions")
    assert (deployed.model, deployed.engine_path) == (name, b"/v1/chat/completions")
    assert found("OPTIONS", f"/v1/models/{written}").kind is Kind.PREFLIGHT


@pytest.mark.parametrize(
    "written",
    [
        "a%252Fb", "a%", "a%2", "a%zz", "a%-1", "a% 2", "%", "%2F", "a%2F", "%2Fa", "a%2F%2Fb", "%2e%2e", "a%2F..%2Fb",
        "a%2f%2e%2e%2fb", "a%00", "a%0A", "a%0d%0ab", "a%7F", "%20b", "a%3Fb", "a%23", "a%5Cb", "a%C3%A9", "a%E9",
        "a%FF", "%u0061", "a+%", "%41" * 257,
    ],
)  # fmt: skip
def test_path_with_invalid_decoded_model_name_matches_no_operation(written: str) -> None:
    assert find_operation(b"GET", f"/v1/models/{written}".encode()) is None
    assert find_operation(b"POST", f"/openai/deployments/{written}/chat/completions".encode()) is None


@pytest.mark.parametrize(
    "path", ["/v1%2Fmodels", "/v1/model%73", "/v1/models%2Fa", "/%76%31/models/a", "/openai%2Fv1/models/a", "/healt%68"]
)
def test_percent_encoding_outside_the_model_name_matches_no_operation(path: str) -> None:
    assert find_operation(b"GET", path.encode()) is None
    assert find_operation(b"POST", b"/openai/deployments/a/chat%2Fcompletions") is None
    assert find_operation(b"POST", b"/openai%2Fdeployments/a/chat/completions") is None


def test_get_request_to_health_paths_is_the_health_operation() -> None:
    for path in ("/health", "/healthz", "/v1/health", "/health/"):
        assert found("GET", path) == found("HEAD", path) == Operation(Kind.HEALTH)
    assert found("GET", "/") == found("GET", "//") == found("HEAD", "/") == Operation(Kind.LANDING)


@pytest.mark.parametrize("name", [*OPENAI, "messages", "messages/count_tokens", "rerank", "score"])
def test_path_with_extra_slashes_or_repeated_or_missing_v1_is_served(name: str) -> None:
    served = found("POST", f"/v1/{name}")
    for variant in ("//v1/{}", "///v1/{}", "/v1/v1/{}", "/v1/v1/v1/{}", "/v1/{}/", "/{}", "//{}/", "//v1/v1/{}/"):
        assert found("POST", variant.format(name)) == served
        assert found("OPTIONS", variant.format(name)).kind is Kind.PREFLIGHT
    deployed = f"/openai/deployments/m/{name}"
    if name in OPENAI:
        assert found("POST", f"/{deployed}/") == found("POST", deployed)


@pytest.mark.parametrize("variant", ["//v1/{}", "/v1/v1/{}", "/v1/{}/", "/{}"])
def test_models_path_with_extra_slash_or_repeated_or_missing_v1_is_served(variant: str) -> None:
    assert found("GET", variant.format("models")) == Operation(Kind.LIST_MODELS)
    assert found("GET", variant.format("models/lab%2Fm")) == Operation(Kind.GET_MODEL, model="lab/m")


@pytest.mark.parametrize(
    ("path", "suggestion"),
    [
        ("/V1/Chat/Completions", "/v1/chat/completions"),
        ("/v1//chat/completions", "/v1/chat/completions"),
        ("/api/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat%2fcompletions", "/v1/chat/completions"),
        ("/v1/chat/completions;a=b", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/chat", "/v1/chat/completions"),
        ("/openai/chat/completions", "/v1/chat/completions"),
        ("/v1/engines/m/completions", "/v1/completions"),
        ("/v2/embedding", "/v1/embeddings"),
        ("/api/models", "/v1/models"),
        ("/v1/Model", "/v1/models"),
        ("/anthropic/v1/messages", "/v1/messages"),
        ("/v1/tokenize", "/tokenize"),
        ("/status/health", "/health"),
        ("/metrics", ""),
        ("/", ""),
        ("/v1/canary", ""),
        ("/" + "a/" * 600 + "models", ""),
    ],
)
def test_only_a_path_similar_to_a_known_api_path_gets_it_as_suggestion(path: str, suggestion: str) -> None:
    assert suggest_path(path.encode()) == suggestion
    if suggestion:
        assert find_operation(b"POST", path.encode()) is None
        assert found("POST", suggestion)


def test_head_is_treated_like_get_and_is_not_allowed_on_post_paths() -> None:
    for path in GOT:
        assert found("HEAD", path) == found("GET", path)
    for path in POSTED:
        assert found("HEAD", path) == found("PUT", path)


def test_deployment_path_with_a_slash_gives_a_model_name_with_namespace() -> None:
    assert found("POST", "/openai/deployments/lab/tiny/chat/completions").model == "lab/tiny"


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/models", "/v1/models/m", "/health", "/openai/deployments/m/embeddings"]
)
def test_options_request_on_known_path_is_treated_as_cors_preflight(path: str) -> None:
    assert found("OPTIONS", path).kind is Kind.PREFLIGHT


UNKNOWN = {
    "OPTIONS": ["/metrics", "/v1/load_lora_adapter", "/v1/models/../health"],
    "POST": [
        "/v1", "/v1/", "/v1/chat/completions//", "/v1//chat/completions", "/v2/v1/chat/completions",
        "/V1/chat/completions", "/v1/chat%2fcompletions", "/v1/../v1/chat/completions", "/metrics",
        "/v1/%2e%2e/metrics", "/v1/load_lora_adapter", "/openai/deployments//chat/completions",
        "/openai/deployments/chat/completions", "/openai/deployments/../chat/completions",
        "/openai/deployments/a//b/embeddings", "/openai/deployments/m/models", "/openai/chat/completions",
        "/openai/deployments/" + "m" * 257 + "/embeddings", "/v1/chat/completions;a=b",
    ],
    "GET": [
        "/v1/models//", "/v1/models/.", "/v1/models/../x", "/v1/models/a/../b", "/v1/models/a//",
        "/v1/models/" + "a" * 257, "/healt/", "/v1/tokenize", "/v1" * 500 + "/models",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("method", "path"), [(method, path) for method, paths in UNKNOWN.items() for path in paths])
def test_request_on_unknown_path_matches_no_operation(method: str, path: str) -> None:
    assert find_operation(method.encode(), path.encode()) is None


GOT = ["/health", "/v1/models", "/openai/v1/models", "/v1/models/m", "/openai/v1/models/lab%2Fm"]
POSTED = {"/v1/chat/completions": "openai", "/openai/v1/images/edits": "openai",
          "/openai/deployments/m/chat/completions": "openai", **OTHERS}  # fmt: skip


@pytest.mark.parametrize("method", ["PUT", "DELETE", "TRACE", "CONNECT", "PATCH", "post", "get", "PRI", ""])
def test_unsupported_method_returns_allowed_methods_and_dialect(method: str) -> None:
    for path in GOT:
        assert found(method, path) == Operation(Kind.NOT_ALLOWED, allow=b"GET, HEAD, OPTIONS")
    for path, dialect in POSTED.items():
        assert found(method, path)[:3] == (Kind.NOT_ALLOWED, b"", dialect)
        assert found(method, path).allow == b"POST, OPTIONS"


def test_post_on_get_paths_and_get_on_post_paths_are_not_allowed() -> None:
    for path in GOT:
        assert found("POST", path) == found("PUT", path)
    for path in POSTED:
        assert found("GET", path) == found("PUT", path)


@pytest.mark.parametrize("method", ["HEAD", "PUT", "DELETE", "CONNECT", "post", ""])
@pytest.mark.parametrize("path", ["/metrics", "/v1", "/v1/models/../m", "/openai/deployments/m"])
def test_unknown_path_matches_no_operation_for_any_method(method: str, path: str) -> None:
    assert find_operation(method.encode(), path.encode()) is None


@settings(derandomize=True, deadline=None, max_examples=examples(500))
@given(
    st.lists(
        st.sampled_from(
            ["/", "v1", "openai", "deployments", "..", "%2f", "%2e", "%25", "m", "chat/completions", "?", "\\"]
        ),
        max_size=8,
    )
)
def test_random_request_path_never_yields_dot_segments_for_the_engine(parts: list[str]) -> None:
    operation = find_operation(b"POST", "".join(parts).encode())
    if operation is not None and operation.kind is not Kind.NOT_ALLOWED:
        assert operation.engine_path.startswith(b"/v1/")
        assert b".." not in operation.engine_path
        assert operation.model is None or not {"%", ".."} & set(operation.model.split("/"))
