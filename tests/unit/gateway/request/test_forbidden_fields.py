"""Body fields that would redirect a request, or a part of it, are rejected wherever such names are looked up."""

from __future__ import annotations

import pytest

from gateway.errors import CallError
from gateway.http.body_buffers import LARGE_BYTES, Body, ChunkedBody
from gateway.request import forbidden_fields
from gateway.request.body_members import read_json
from gateway.request.multipart import read_multipart

FORM = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'


def refused(error: CallError, name: str) -> bool:
    return (error.status, error.code, error.param) == (400, "invalid_request", name) and name in error.message


@pytest.mark.parametrize("name", sorted(forbidden_fields.PLACES))
def test_error_for_a_forbidden_field_contains_its_name_without_value(name: str) -> None:
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in name)
    forms = FORM % (name.encode(), b"http://canary") + FORM % (b"model", b"m") + b"--b--"
    for read in (
        lambda: read_json(b'{"model":"m","%b":"http://canary"}' % name.encode()),
        lambda: read_json(b'{"%b":null,"model":"m"}' % escaped.encode()),
        lambda: read_multipart(forms, b"multipart/form-data; boundary=b"),
    ):
        with pytest.raises(CallError) as caught:
            read()
        assert refused(caught.value, name)
        assert "canary" not in caught.value.message


@pytest.mark.parametrize("large", [False, True])
def test_cache_salt_field_is_rejected_in_a_form_but_accepted_in_json(*, large: bool) -> None:
    """It is removed from JSON; nothing is removed from a form."""
    file = FORM % (b"file", b"x" * (LARGE_BYTES if large else 1))
    forms = FORM % (b"model", b"m") + file + FORM % (b"cache_salt", b"theirs") + b"--b--"
    body: Body = forms
    if large:
        body = ChunkedBody()
        body.add(forms)
    with pytest.raises(CallError) as caught:
        read_multipart(body, b"multipart/form-data; boundary=b")
    assert refused(caught.value, "cache_salt")
    assert read_json(b'{"model":"m","cache_salt":"theirs"}').model == "m"


@pytest.mark.parametrize(("name", "fix"), [("lora", "model:adapter"), ("rid", "x-request-id"), ("extra_key", "cache")])
def test_error_for_a_forbidden_field_names_the_supported_alternative(name: str, fix: str) -> None:
    with pytest.raises(CallError) as caught:
        forbidden_fields.check_members([name])
    assert fix in caught.value.message


VARIANTS = {
    "Model": "model",
    "MODEL": "model",
    "\\u004dodel": "model",
    "\u017ftream": "stream",
    "STREAM": "stream",
    "Stream_Options": "stream_options",
    "Cache_Salt": "cache_salt",
    "LoRA": "lora",
    "Api_Base": "api_base",
    "boot\u017ftrap_host": "bootstrap_host",
    "extra_\u212aey": "extra_key",
    "\\u017ftream": "stream",
}
"""Names that Go's encoding/json matches with the name on the right."""


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("large", [False, True])
def test_json_member_with_case_variant_of_reserved_name_is_rejected(name: str, large: bool) -> None:
    filler = b"x" * (LARGE_BYTES if large else 1)
    text = b'{"model":"m","filler":"%b","%b":"secret"}' % (filler, name.encode())
    body: bytes | ChunkedBody = text
    if large:
        body = ChunkedBody()
        body.add(text)
    with pytest.raises(CallError) as caught:
        read_json(body)
    assert refused(caught.value, VARIANTS[name])
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("name", [name for name in VARIANTS if name.isascii() and "\\" not in name])
def test_form_part_with_case_variant_of_reserved_name_is_rejected(name: str) -> None:
    forms = FORM % (b"model", b"m") + FORM % (name.encode(), b"secret") + b"--b--"
    with pytest.raises(CallError) as caught:
        read_multipart(forms, b"multipart/form-data; boundary=b")
    assert refused(caught.value, VARIANTS[name])


@pytest.mark.parametrize("name", [name for name in VARIANTS if not name.isascii()])
def test_form_part_whose_name_is_not_ascii_is_rejected(name: str) -> None:
    forms = FORM % (b"model", b"m") + FORM % (name.encode(), b"secret") + b"--b--"
    with pytest.raises(CallError) as caught:
        read_multipart(forms, b"multipart/form-data; boundary=b")
    assert caught.value.status == 400
    assert "secret" not in caught.value.message


def test_case_variant_of_include_usage_is_rejected() -> None:
    with pytest.raises(CallError) as caught:
        read_json(b'{"model":"m","stream":true,"stream_options":{"Include_Usage":false}}')
    assert refused(caught.value, "include_usage")
    assert read_json(b'{"model":"m","stream":true,"stream_options":{"Continuous":1}}').stream


def test_unreserved_names_with_capital_letters_are_accepted() -> None:
    assert read_json(b'{"model":"m","X-Extra":1,"toolChoice":"auto","\xc3\xa4":2}').model == "m"


def test_no_field_name_exempt_from_the_check_is_forbidden() -> None:
    """Bodies with no other names skip the checks."""
    assert not forbidden_fields.USUAL & forbidden_fields.PLACES
    assert all(name == name.casefold() for name in forbidden_fields.USUAL)


def test_forbidden_names_in_nested_objects_are_accepted() -> None:
    body = b'{"model":"m","messages":[{"api_base":"x","content":{"lora_path":"y"}}],"tools":[{"base_url":"z"}]}'
    assert read_json(body).body == body


def test_common_body_field_names_pass_the_forbidden_field_check() -> None:
    forbidden_fields.check_members(["model", "messages", "url", "file", "image_url", "IMAGE_URL", "api_base_"])
    forbidden_fields.check_members([])
