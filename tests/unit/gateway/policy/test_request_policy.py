"""Request policies applied to bodies of each API: JSON that arrives at once or in pieces, and forms."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from autoscaler.contract import RESERVED_MEMBERS, ModelEntry, ModelName, PolicyEntry, TenantEntry, TenantName
from gateway.dialects import ollama_requests
from gateway.errors import CallError
from gateway.http.body_buffers import Body, ChunkedBody
from gateway.policy.request_policy import FOUND_MAX, Policies, Policy
from gateway.request.api_routes import find_operation
from gateway.request.body_members import edit_body, read_body, start_scan
from gateway.request.forbidden_fields import PLACES, READ
from tests.support.net.upstream_requests import in_one, json_members

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, TRANSCRIPTIONS = "/v1/messages", "/v1/audio/transcriptions"
NO_POLICY = PolicyEntry()
TYPE = b"multipart/form-data; boundary=b"


def entry(**rules: Any) -> PolicyEntry:
    """Build a policy from plain values."""
    for key in ("defaults", "forced"):
        if key in rules:
            rules[key] = {name: json.dumps(value) for name, value in rules[key].items()}
    return PolicyEntry(**rules)


def policy(tenant: PolicyEntry = NO_POLICY, **rules: Any) -> Policy:
    return Policy(entry(**rules), tenant, "m")


def in_pieces(path: str, body: bytes, content_type: bytes, watched: frozenset[str]) -> ChunkedBody:
    found = find_operation(b"POST", path.encode())
    assert found is not None
    pieces = ChunkedBody()
    start_scan(found, pieces, content_type, watched)
    for start, end in itertools.pairwise([*range(0, len(body), 7), len(body)]):
        pieces.add(body[start:end])
        while pieces.scan is not None and not pieces.scan.step(len(pieces)):
            pass
    return pieces


def edited(applied: Policy, path: str, body: bytes, content_type: bytes = b"application/json") -> bytes:
    """Return the body for the engine, which is the same whether the body arrives at once or in pieces."""
    found = find_operation(b"POST", path.encode())
    assert found is not None
    bodies: list[Body] = [body, in_pieces(path, body, content_type, applied.members)]
    bodies.append(in_pieces(path, body, content_type, frozenset()))  # the policy came while the body arrived
    out = []
    for one in bodies:
        try:
            peek = read_body(found, one, content_type, watched=applied.members)
            out.append(in_one(edit_body(found, peek, "m", policy=applied)))
        except CallError as error:
            out.append(repr((error.status, error.param)).encode())
    if content_type == b"application/json" and out[0].startswith(b"{"):
        assert json.loads(out[0]) == json.loads(out[1]) == json.loads(out[2])
        names = [name for name, _ in json_members(out[1])]
        assert len(names) == len({*names})
    else:
        assert out[0] == out[1] == out[2]
    return out[0]


def members(applied: Policy, path: str = CHAT, **sent: Any) -> dict[str, Any]:
    """Return the members for the engine without `model`."""
    body = edited(applied, path, json.dumps({"model": "m", **sent}).encode())
    found: dict[str, Any] = json.loads(body)
    assert found.pop("model") == "m"
    return found


def refused(applied: Policy, body: bytes, path: str = CHAT, content_type: bytes = b"application/json") -> str:
    """Return the member that a 400 names."""
    status, param = eval(edited(applied, path, body, content_type))  # noqa: S307  the tuple that `edited` wrote
    assert status == 400
    return str(param)


# --- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "sent", "expected"),
    [
        ({"defaults": {"temperature": 0.5}}, {}, {"temperature": 0.5}),
        ({"defaults": {"temperature": 0.5}}, {"temperature": 0}, {"temperature": 0}),
        ({"defaults": {"temperature": 0.5}}, {"temperature": None}, {"temperature": 0.5}),
        ({"forced": {"temperature": 0.5}}, {}, {"temperature": 0.5}),
        ({"forced": {"temperature": 0.5}}, {"temperature": 2}, {"temperature": 0.5}),
        ({"forced": {"seed": None}}, {"seed": 1}, {"seed": None}),
        ({"forced": {"chat_template_kwargs": {"enable_thinking": False}}}, {"chat_template_kwargs": {"a": [1]}},
         {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"caps": {"temperature": 1}}, {"temperature": 1.5}, {"temperature": 1}),
        ({"caps": {"temperature": 1}}, {"temperature": 0.5}, {"temperature": 0.5}),
        ({"caps": {"temperature": 1}}, {"temperature": -1}, {"temperature": -1}),
        ({"caps": {"temperature": 1}}, {"temperature": None}, {"temperature": None}),
        ({"caps": {"temperature": 1}}, {}, {}),
        ({"caps": {"top_p": 0.25}}, {"top_p": 1}, {"top_p": 0.25}),
        ({"removed": ("tools",)}, {"tools": [{"type": "function"}], "seed": 1}, {"seed": 1}),
        ({"removed": ("tools",)}, {"functions": [], "tool_choice": "auto", "parallel_tool_calls": True}, {}),
        ({"removed": ("tool_choice",)}, {"tools": [], "tool_choice": "auto"}, {"tools": []}),
        ({"removed": ("seed",), "defaults": {"seed": 1}}, {"seed": 2}, {"seed": 1}),
        ({"removed": ("seed",), "forced": {"seed": 1}}, {"seed": 2}, {"seed": 1}),
        ({"forced": {"seed": 9}, "caps": {"seed": 5}, "defaults": {"seed": 1}}, {"seed": 2}, {"seed": 9}),
        ({"defaults": {"seed": 9}, "caps": {"seed": 5}}, {}, {"seed": 5}),
    ],
)  # fmt: skip
def test_policy_adds_forces_caps_or_removes_members_of_a_chat_request(
    rules: dict[str, Any], sent: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert members(policy(**rules), **sent) == expected


@pytest.mark.parametrize(
    "name", ["max_tokens", "max_completion_tokens", "max_output_tokens", "num_predict", "n_predict"]
)
def test_cap_on_tokens_applies_to_each_member_that_limits_tokens(name: str) -> None:
    capped = policy(caps={"max_tokens": 100})
    for sent, expected in ((1e6, 100), (101, 100), (100, 100), (7, 7), (-1, 100), (-2, 100), (0, 1), (0.5, 1)):
        assert members(capped, CHAT, **{name: sent}) == {name: expected}
        default = policy(entry(caps={"max_tokens": 100}), defaults={name: sent})
        assert members(default) == {"max_tokens": expected}
    assert members(policy(caps={name: 0}), CHAT, **{name: 50}) == {name: 1}, "0 would mean no limit in Ollama"
    body = b'{"model":"m","%b":%b}'
    for number in (b"1e999", b"9" * 300, b"100.5", b"1E+3"):
        assert json.loads(edited(capped, CHAT, body % (name.encode(), number)))[name] == 100
    for value in (b'"7"', b"true", b"[7]", b'{"a":7}', b'"' + b"7" * 5000 + b'"'):
        assert refused(capped, body % (name.encode(), value)) == name


@pytest.mark.parametrize("name", ["prompt_logprobs", "logprobs", "top_logprobs", "truncate_prompt_tokens", "top_k"])
def test_cap_replaces_numbers_that_mean_no_limit(name: str) -> None:
    capped = policy(caps={name: 5})
    for sent, expected in ((-1, 5), (-2, 5), (6, 5), (5, 5), (1, 1), (0, 5 if name == "top_k" else 0)):
        assert members(capped, COMPLETIONS, **{name: sent}) == {name: expected}


@pytest.mark.parametrize(
    ("path", "name"),
    [(CHAT, "max_tokens"), (COMPLETIONS, "max_tokens"), (MESSAGES, "max_tokens"), (RESPONSES, "max_output_tokens")],
)
def test_configured_token_limit_is_sent_under_the_name_the_api_uses(path: str, name: str) -> None:
    for configured in ("max_tokens", "max_completion_tokens", "n_predict"):
        assert members(policy(defaults={configured: 5}), path) == {name: 5}
        assert members(policy(defaults={configured: 5}), path, max_completion_tokens=3) == {"max_completion_tokens": 3}
        assert members(policy(forced={configured: 5}), path, n_predict=9, max_tokens=9) == {name: 5}
        assert members(policy(removed=(configured,)), path, n_predict=9, max_tokens=9) == {}


@pytest.mark.parametrize(
    ("name", "same"), [("n", "best_of"), ("n", "n_cmpl"), ("repetition_penalty", "repeat_penalty")]
)
def test_policy_rule_for_a_member_applies_to_its_synonyms(name: str, same: str) -> None:
    assert members(policy(caps={name: 1}), COMPLETIONS, **{same: 64}) == {same: 1}
    assert members(policy(removed=(same,)), COMPLETIONS, **{name: 64}) == {}
    assert members(policy(forced={name: 1}), COMPLETIONS, **{same: 64}) == {name: 1}


def test_tenant_policy_overrides_model_policy_and_the_lower_cap_applies() -> None:
    tenant = entry(
        defaults={"top_k": 2}, forced={"seed": 2}, caps={"max_tokens": 20, "n": 2}, removed=("user",)
    )  # fmt: skip
    both = policy(
        tenant,
        defaults={"top_k": 1, "min_p": 1},
        forced={"seed": 1, "stop": "x"},
        caps={"max_completion_tokens": 10, "n": 3},
        removed=("tools",),
    )
    assert members(both, max_tokens=99, n=9, user="u", tools=[], logit_bias={}) == {
        "top_k": 2, "min_p": 1, "seed": 2, "stop": "x", "max_tokens": 10, "n": 2, "logit_bias": {},
    }  # fmt: skip
    forced = Policy(entry(forced={"max_completion_tokens": 1}), entry(forced={"max_tokens": 2}), "m")
    assert members(forced) == {"max_tokens": 2}


# --- variants that must not bypass a policy --------------------------------------------------------------------------


@pytest.mark.parametrize("written", [b"n", b"\\u006e"])
def test_policy_applies_to_members_whose_names_are_json_escaped(written: bytes) -> None:
    body = b'{"model":"m","%b":8}' % written
    assert json.loads(edited(policy(caps={"n": 2}), CHAT, body)) == {"model": "m", "n": 2}
    assert json.loads(edited(policy(forced={"n": 1}), CHAT, body)) == {"model": "m", "n": 1}
    assert json.loads(edited(policy(removed=("n",)), CHAT, body)) == {"model": "m"}


def test_body_that_repeats_a_member_of_a_policy_rule_is_rejected() -> None:
    for body in (b'{"model":"m","n":1,"n":8}', b'{"model":"m","n":1,"\\u006e":8}'):
        assert refused(policy(removed=("n",)), body) == "None"


@pytest.mark.parametrize(
    ("configured", "sent"),
    [("n", "N"), ("tools", "Tools"), ("tools", "TOOL\u017f"), ("top_k", "top_\u212a"), ("topK", "topk"),
     ("max_tokens", "Max_Completion_Tokens"), ("num_predict", "N_Predict")],
)  # fmt: skip
def test_member_that_differs_from_a_policy_rule_only_in_case_is_rejected(configured: str, sent: str) -> None:
    for rules in ({"caps": {configured: 1}}, {"forced": {configured: 1}}, {"removed": (configured,)}):
        body = json.dumps({"model": "m", sent: 8}).encode()
        assert refused(policy(**rules), body).casefold() == sent.casefold()


def test_members_are_removed_at_any_position_of_whole_or_chunked_bodies() -> None:
    for kept in itertools.product((True, False), repeat=5):
        names = [name if keep else f"x{name}" for name, keep in zip("abcde", kept, strict=True)]
        sent = {name: {"k": [1, ",", "}"]} for name in names}
        removed = tuple(f"x{name}" for name in "abcde")
        for spaced in (",", " , \n"):
            body = json.dumps({**sent, "model": "m"}, separators=(spaced, " : ")).encode()
            found = json.loads(edited(policy(removed=removed, defaults={"z": 1}), CHAT, body))
            assert found == {**{name: sent[name] for name in names if name[0] != "x"}, "model": "m", "z": 1}


def test_policy_applies_to_the_options_of_an_ollama_request() -> None:
    found = find_operation(b"POST", b"/api/chat")
    assert found is not None
    applied = policy(caps={"max_tokens": 100}, forced={"temperature": 0}, removed=("tools", "seed"))
    body = json.dumps(
        {
            "model": "m",
            "messages": [{"role": "user", "content": "Hi"}],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "options": {"num_predict": 5000, "temperature": 2, "seed": 7, "top_k": 3},
        }
    ).encode()
    translated = ollama_requests.translate_request(found, body)
    peek = read_body(translated.target, translated.body, b"application/json", watched=applied.members)
    out = json.loads(in_one(edit_body(translated.target, peek, "m", policy=applied)))
    assert (out["max_tokens"], out["temperature"], out["top_k"]) == (100, 0, 3)
    assert not {"tools", "seed"} & out.keys()


# --- forms -----------------------------------------------------------------------------------------------------------


def form(*parts: tuple[str, str], preamble: str = "") -> bytes:
    out = preamble
    for name, value in parts:
        out += f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
    return (out + "--b--\r\n").encode()


@pytest.mark.parametrize("preamble", ["", "x\r\n"])
@pytest.mark.parametrize(
    ("rules", "sent", "expected"),
    [
        ({"forced": {"temperature": 0}}, (("temperature", "1"), ("model", "m"), ("file", "a")),
         (("temperature", "0"), ("model", "m"), ("file", "a"))),
        ({"forced": {"language": "de"}}, (("model", "m"),), (("language", "de"), ("model", "m"))),
        ({"removed": ("a",)}, (("a", "1"), ("model", "m"), ("ab", "2")), (("model", "m"), ("ab", "2"))),
        ({"removed": ("x[]",)}, (("x[]", "1"), ("x[]", "2"), ("model", "m")), (("model", "m"),)),
        ({"caps": {"temperature": 1}}, (("model", "m"), ("temperature", "7")), (("temperature", "1"), ("model", "m"))),
        ({"caps": {"top_p": 1}}, (("model", "m"), ("top_p", "0.5")), (("model", "m"), ("top_p", "0.5"))),
        ({"defaults": {"a": 1, "b": True}}, (("model", "m"), ("a", "2")), (("b", "true"), ("model", "m"), ("a", "2"))),
        ({"removed": ("a",), "defaults": {"b": 1}}, (("a", "1"), ("model", "other"), ("a2", "")),
         (("b", "1"), ("model", "m"), ("a2", ""))),
    ],
)  # fmt: skip
def test_policy_adds_forces_caps_or_removes_parts_of_a_form(
    rules: dict[str, Any], sent: tuple[tuple[str, str], ...], expected: tuple[tuple[str, str], ...], preamble: str
) -> None:
    assert edited(policy(**rules), TRANSCRIPTIONS, form(*sent, preamble=preamble), TYPE) == form(*expected)


def test_form_without_a_model_part_gets_the_model_and_the_forced_parts() -> None:
    found = find_operation(b"POST", TRANSCRIPTIONS.encode())
    assert found is not None
    for preamble in ("", "x\r\n"):
        applied = policy(forced={"a": 1}, removed=("c",))
        peek = read_body(found, form(("c", "1"), ("file", "f"), preamble=preamble), TYPE, "m")
        out = in_one(edit_body(found, peek, "m", policy=applied))
        assert sorted(out.split(b"--b\r\n")) == sorted(
            form(("model", "m"), ("a", "1"), ("file", "f")).split(b"--b\r\n")
        )


@pytest.mark.parametrize(
    "parts",
    [(("temperature", "1"), ("temperature", "2")), (("Temperature", "2"),), (("temperature ", "2"),),
     (("temper%61ture", "2"),), (("temperature", "hot"),), (("temperature", ""),)],
)  # fmt: skip
def test_form_part_with_an_ambiguous_name_or_invalid_value_is_rejected(parts: tuple[tuple[str, str], ...]) -> None:
    refused(policy(caps={"temperature": 1}), form(("model", "m"), *parts), TRANSCRIPTIONS, TYPE)


def test_boundary_that_occurs_in_a_forced_value_is_rejected() -> None:
    refused(policy(forced={"language": "x--b"}), form(("model", "m")), TRANSCRIPTIONS, TYPE)


# --- lookup ----------------------------------------------------------------------------------------------------------


def model(name: str, rules: PolicyEntry | None = None) -> ModelEntry:
    return ModelEntry(name=ModelName(name), served_name=name, policy=rules)


def tenant(name: str, rules: PolicyEntry | None = None) -> TenantEntry:
    return TenantEntry(name=TenantName(name), policy=rules)


def test_policies_are_empty_if_no_model_or_tenant_has_a_policy() -> None:
    assert built([model("m")], [tenant("t")]).empty


def built(models: list[ModelEntry], tenants: list[TenantEntry]) -> Policies:
    found = Policies()
    found.update({one.name: one.policy for one in models}, {one.name: one.policy for one in tenants})
    return found


def test_policy_is_found_by_tenant_model_and_requested_name() -> None:
    high = {"m:high": {"reasoning_effort": '"high"', "max_tokens": "9"}}
    rules = entry(forced={"reasoning_effort": "low", "max_completion_tokens": 1})
    rules = PolicyEntry(forced=rules.forced, forced_by_name=high)
    policies = built([model("m", rules), model("o")], [tenant("t", entry(removed=("tools",))), tenant("u")])
    assert policies.members >= {"tools", "reasoning_effort", "max_tokens"}
    assert policies.find(tenant("u"), model("o"), "o") is None
    removing = policies.find(tenant("t"), model("o"), "o")
    assert removing is not None
    assert members(removing, tools=[]) == {}
    low, high_effort = (policies.find(tenant("t"), model("m"), name) for name in ("m", "m:high"))
    assert low is not None
    assert high_effort is not None
    assert members(low, tools=[], max_tokens=5) == {"reasoning_effort": "low", "max_tokens": 1}
    assert members(high_effort) == {"reasoning_effort": "high", "max_tokens": 9}
    assert policies.find(tenant("t"), model("m"), "m") is low
    assert policies.find(tenant("t"), model("m"), "alias of m") is low
    assert policies.find(tenant("t"), model("m"), "m:high:latest") is high_effort


def test_combined_policy_is_cached_until_its_model_or_tenant_changes() -> None:
    rules = entry(removed=("tools",), caps={"n": 1})
    policies = built([model("m", rules), model("o", rules)], [tenant("t", entry(removed=("seed",))), tenant("u")])
    assert policies._found == {}
    found = [policies.find(tenant(of), model(name), name) for of in ("t", "u") for name in ("m", "o")]
    assert len(policies._found) == 4
    policies.update({ModelName("o"): rules}, {TenantName("t"): entry(removed=("seed",)), TenantName("u"): None})
    assert [policies.find(tenant(of), model(name), name) for of in ("t", "u") for name in ("m", "o")] == found
    policies.update({ModelName("o"): entry(removed=("top_p",))}, {})
    assert policies.find(tenant("u"), model("m"), "m") is found[1 + 1]
    changed = policies.find(tenant("u"), model("o"), "o")
    assert changed is not None
    assert changed.members == {"top_p"}
    policies.update({}, {TenantName("t"): None})
    assert policies.find(tenant("t"), model("o"), "o") is changed
    assert policies.members >= {"tools", "n", "top_p"}
    policies.update({ModelName("m"): None}, {})
    assert policies.members == {"top_p"}
    policies.update({ModelName("o"): None}, {})
    assert (policies.empty, policies.members, policies._found) == (True, frozenset(), {})


def test_combined_policy_cache_is_cleared_at_its_size_limit() -> None:
    tenants = [tenant(f"t{number}", entry(removed=("seed",))) for number in range(FOUND_MAX + 1)]
    policies = built([], tenants)
    for one in tenants:
        policies.find(one, model("m"), "m")
    assert len(policies._found) == 1


def test_watched_members_include_the_members_of_every_combined_policy() -> None:
    rules = entry(caps={"max_tokens": 5}, defaults={"n": 2}, removed=("tools",), forced={"seed": 1})
    rules = PolicyEntry(rules.defaults, rules.forced, rules.caps, rules.removed, {"x": {"repeat_penalty": "1"}})
    policies = built([model("m", rules)], [tenant("t", entry(forced={"best_of": 1}, defaults={"top_k": 3}))])
    for name in ("m", "x"):
        found = policies.find(tenant("t"), model("m"), name)
        assert found is not None
        assert found.members <= policies.members


def test_reserved_members_include_every_member_that_is_read_or_rejected() -> None:
    assert RESERVED_MEMBERS >= PLACES | READ
    assert all(name == name.casefold() for name in RESERVED_MEMBERS)
