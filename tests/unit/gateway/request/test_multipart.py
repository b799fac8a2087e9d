"""Forms: a strict grammar finds the parts `model` and `stream`; files stay unchanged."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.errors import CallError
from gateway.request.multipart import PARTS_MAX, VALUE_BYTES_MAX, edit_multipart, read_multipart
from tests.support.example_budget import examples
from tests.support.net.upstream_requests import in_one

TYPE = b"multipart/form-data; boundary=b"


def part(name: str, value: bytes, more: bytes = b"") -> bytes:
    return b'--b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n' % (name.encode(), more, value)


FILE = part("file", b"\x00\xff--b\r\n--\r\n\r\n", b'; filename="a.wav"\r\nContent-Type: audio/wav')
MODEL = part("model", b"whisper")
END = b"--b--\r\n"
NAMED = b'Content-Disposition: form-data; name="x"\r\n'


def refusal(body: bytes, content_type: bytes = TYPE) -> CallError:
    with pytest.raises(CallError) as caught:
        read_multipart(body, content_type)
    assert (caught.value.status, caught.value.code) == (400, "invalid_request")
    return caught.value


@pytest.mark.parametrize(
    "body",
    [
        FILE + MODEL + END,
        MODEL + FILE + END[:-2],
        part("a[b]-c.d", b"") + MODEL + END,
        MODEL + part("stream", b"false") + END,
    ],
)
def test_model_part_is_found_at_any_position(body: bytes) -> None:
    form = read_multipart(body, TYPE)
    assert (form.model, form.stream, in_one(form.body)[form.start : form.end]) == ("whisper", False, b"whisper")
    assert edit_multipart(form, model="whisper") is body
    assert edit_multipart(form, model="/m/large") == body.replace(b"\r\n\r\nwhisper\r\n", b"\r\n\r\n/m/large\r\n")


@pytest.mark.parametrize(
    ("value", "stream"), [(b"true", True), (b"True", True), (b"1", True), (b"0", False), (b"", False)]
)
def test_stream_part_of_a_form_with_a_boolean_value_is_parsed(value: bytes, stream: bool) -> None:
    assert read_multipart(MODEL + part("stream", value) + END, TYPE).stream is stream


def test_stream_part_that_is_not_a_boolean_is_rejected() -> None:
    assert refusal(MODEL + part("stream", b"maybe") + END).param == "stream"


def test_form_without_model_part_uses_model_from_path_or_header() -> None:
    form = read_multipart(FILE + END, TYPE, path_model="m")
    assert edit_multipart(form, model="served") == (
        b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nserved\r\n' + FILE + END
    )
    assert read_multipart(edit_multipart(form, model="served"), TYPE).model == "served"
    assert read_multipart(FILE + END, TYPE, header_model="m").model == "m"
    assert refusal(FILE + END).param == "model"
    with pytest.raises(CallError, match="x-model"):
        read_multipart(MODEL + END, TYPE, header_model="other")


@pytest.mark.parametrize(
    "content_type",
    [
        b'multipart/form-data; boundary="b"',
        b"Multipart/Form-Data;boundary=b",
        b"multipart/form-data; boundary=b; charset=utf-8",
    ],
)
def test_form_with_a_valid_boundary_is_accepted(content_type: bytes) -> None:
    assert read_multipart(MODEL + END, content_type).model == "whisper"


@pytest.mark.parametrize(
    "content_type",
    [b"multipart/form-data", b"multipart/form-data; boundary=", b"multipart/form-data; boundary=b; boundary=c",
     b'multipart/form-data; boundary="b ', b"multipart/form-data; boundary=" + b"b" * 71,
     b"multipart/mixed; boundary=b", b"multipart/form-data; boundary=b; x=y", b'multipart/form-data; boundary="b "'],
)  # fmt: skip
def test_form_with_an_invalid_boundary_is_rejected(content_type: bytes) -> None:
    refusal(MODEL + END, content_type)


@pytest.mark.parametrize(
    "body",
    [
        b"", MODEL, END[2:], b"\r\n" + MODEL + END, b"preamble\r\n" + MODEL + END, MODEL + END + b"epilogue",
        MODEL + b"--bb--\r\n", MODEL + b"--b --\r\n", MODEL.replace(b"\r\n", b"\n") + END, MODEL + MODEL + END,
        MODEL + part("stream", b"1") + part("stream", b"1") + END,
        part("model", b"a\r\nb") + END, part("model", b"\xff") + END, part("model", b"") + END,
        part("model", b"m" * (VALUE_BYTES_MAX + 1)) + END,
        part("x", b"1", b'; name="model"') + MODEL + END,
        b"--b\r\nContent-Type: a/b\r\n\r\nm\r\n" + MODEL + END,
        b"--b\r\n" + NAMED + NAMED + b"\r\n\r\n" + MODEL + END,
        b'--b\r\nContent-Disposition: form-data;\r\n name="x"\r\n\r\nm\r\n' + MODEL + END,
        b"--b\r\n" + NAMED + b"Content-Transfer-Encoding: base64\r\n\r\nbQ==\r\n" + MODEL + END,
        b"--b\r\n" + NAMED + b"\r\n" + MODEL + END,
        b"--b\r\n" + NAMED + b"--b: y\r\n\r\n\r\n" + MODEL + END,
        b"--b\r\n" + NAMED + b"A: " + b"a" * 9000 + b"\r\n\r\n\r\n" + MODEL + END,
        part("x", b"") * PARTS_MAX + MODEL + END,
        part("file", b'\n--b\nContent-Disposition: form-data; name="model"\n\nevil') + MODEL + END,
        part("file", b"", b"; filename=\xff") + MODEL + END,
        part("/model", b"evil") + MODEL + END,
        part(" model", b"evil") + MODEL + END,
    ],
)  # fmt: skip
def test_malformed_forms_are_rejected(body: bytes) -> None:
    refusal(body)


def test_file_content_that_looks_like_a_form_is_not_parsed() -> None:
    inner = part("model", b"evil").replace(b"--b", b"--c")
    body = part("file", inner, b'; filename="x"') + MODEL + END
    assert read_multipart(body, TYPE).model == "whisper"


def test_served_name_with_line_break_is_rejected() -> None:
    with pytest.raises(CallError):
        edit_multipart(read_multipart(MODEL + END, TYPE), model="a\r\n--b--")


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(
    st.lists(
        st.sampled_from(
            [MODEL, FILE, END, b"--b", b"\r\n", b"--", b'Content-Disposition: form-data; name="model"', b"m"]
        )
        | st.binary(max_size=4),
        max_size=8,
    )
)
def test_random_form_is_rejected_or_yields_its_model_name(parts: list[bytes]) -> None:
    body = b"".join(parts)
    try:
        form = read_multipart(body, TYPE)
    except CallError:
        return
    assert body[form.start : form.end].decode() == form.model


@pytest.mark.parametrize(
    ("boundary", "field", "file"),
    [
        ("4f6c2a0b9d8e47d1a3b5c7d9e1f30517", "", "Content-Type: audio/x-wav\r\n"),
        ("------------------------d74496d66958873e", "", "Content-Type: application/octet-stream\r\n"),
        ("----WebKitFormBoundary7MA4YWxkTrZu0gW", "", "Content-Type: audio/wav\r\n"),
        ("----formdata-undici-012345678901", "", "Content-Type: audio/wav\r\n"),
        ("a5f1", "Content-Type: text/plain; charset=utf-8\r\n", "Content-Type: audio/wav\r\nContent-Length: 4\r\n"),
    ],
    ids=["httpx", "curl", "browser", "node", "aiohttp"],
)
def test_forms_of_common_http_clients_are_accepted(boundary: str, field: str, file: str) -> None:
    disposition = "Content-Disposition: form-data; name="
    body = (
        f'--{boundary}\r\n{field}{disposition}"model"\r\n\r\nwhisper\r\n'
        f'--{boundary}\r\n{disposition}"file"; filename="a b.wav"\r\n{file}\r\nRIFF\r\n--{boundary}--\r\n'
    ).encode()
    form = read_multipart(body, f"multipart/form-data; boundary={boundary}".encode())
    assert form.model == "whisper"
    assert edit_multipart(form, model="whisper") is body
