"""Forms: a strict grammar finds the parts `model` and `stream`; files stay unchanged."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
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
def test_form_requests_a_stream_only_if_its_stream_part_is_true_or_1(value: bytes, stream: bool) -> None:
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
        b"multipart/form-data; charset=utf-8; boundary=b",
        b'multipart/form-data; charset="utf-8" ; ; boundary = "b";',
        b'multipart/form-data; x="; boundary=c"; boundary=b',
        b"multipart/form-data; boundary=b; x=y",
    ],
)
def test_form_boundary_is_found_in_any_valid_content_type_notation(content_type: bytes) -> None:
    assert read_multipart(MODEL + END, content_type).model == "whisper"


@pytest.mark.parametrize(
    "content_type",
    [b"multipart/form-data", b"multipart/form-data; boundary=", b"multipart/form-data; boundary=b; boundary=c",
     b'multipart/form-data; boundary="b ', b"multipart/form-data; boundary=" + b"b" * 71,
     b"multipart/mixed; boundary=b", b"multipart/form-data; boundary=b, boundary=c",
     b'multipart/form-data; boundary="b "', b"multipart/form-data; boundary*=utf-8''b",
     b"multipart/form-data boundary=b"],
)  # fmt: skip
def test_form_with_an_invalid_boundary_is_rejected(content_type: bytes) -> None:
    refusal(MODEL + END, content_type)


@pytest.mark.parametrize(
    "body",
    [
        b"", MODEL, END[2:], b"\n" + MODEL + END, b"preamble" + MODEL + END, MODEL + END[:-2] + b"epilogue",
        b"\n--b\r\n" + MODEL + END, b"a" * 9000 + b"\r\n" + MODEL + END, MODEL + END + MODEL, MODEL + END + b"\n--b--",
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
def test_malformed_or_oversized_forms_are_rejected(body: bytes) -> None:
    refusal(body)


DISPOSITION = b"--b\r\nContent-Disposition: form-data%b\r\n\r\nwhisper\r\n"


@pytest.mark.parametrize(
    "parameters",
    [
        b"; name=model", b"; name = model ; ", b";name=model;", b'; filename="a.txt"; name="model"', b'; NAME="model"',
        b"; filename=a.txt; name=model; filename*=utf-8''a.txt", b'; ; name="model"; size=3; x="y;z=\\"1\\""',
    ],
)  # fmt: skip
def test_model_part_is_found_for_any_order_of_disposition_parameters(parameters: bytes) -> None:
    body = DISPOSITION % parameters + FILE + END
    form = read_multipart(body, TYPE)
    assert edit_multipart(form, model="served") == body.replace(b"\r\n\r\nwhisper\r\n", b"\r\n\r\nserved\r\n")


@pytest.mark.parametrize(
    "parameters",
    [
        b"", b"; name", b"; name=", b'; name="model', b"; name=model; name=model", b"; name=a b", b"x; name=model",
        b"; name*=utf-8''model", b"; name=x; name*0=model", b'; filename="x; name=model"; name=file',
        b'; name=file; filename="x;name = lora"', b'; name="a;name=lora"',
        b'; filename="lora"; name="file"', b'; name="mo\\del"',
        b'; name="%6dodel"', b"; name*=utf-8''%6dodel", b"; name=x; name*=utf-8''y", b"; name*=latin-1''y",
        b'; name="=?utf-8?B?bW9kZWw=?="', b'; name="=?utf-8?q?=6dodel?="',
        b'; name="Model "', b'; name="=?utf-8?q?model?="', b'; name="id slot"', '; name="\u017ftream"'.encode(),
    ],
)  # fmt: skip
def test_part_whose_name_parsers_could_read_differently_is_rejected(parameters: bytes) -> None:
    refusal(DISPOSITION % parameters + MODEL + END)


@pytest.mark.parametrize(
    "name", [b"my field", b"\xc3\xa9t\xc3\xa9", b" x ", b'a\\"b', b"a%20b", b"", b"\xff", b"=?utf-8?B?w6k=?="]
)
def test_form_part_with_an_unusual_name_is_forwarded_unchanged(name: bytes) -> None:
    body = DISPOSITION % (b'; name="%b"' % name) + MODEL + END
    assert read_multipart(body, TYPE).body is body


@pytest.mark.parametrize("before", [b"", b"\r\n", b"\r\n\r\n", b"This is a form.\r\n"])
@pytest.mark.parametrize("after", [b"", b"\r\n", b"\r\n\r\n", b" \t\r\n", b"\r\nthe end\r\n", b"\r\n" + b"a" * 9000])
def test_bytes_around_the_parts_are_accepted_and_not_forwarded(before: bytes, after: bytes) -> None:
    for parts in (FILE + MODEL, FILE):
        form = read_multipart(before + parts + b"--b--" + after, TYPE, path_model="m")
        edited = in_one(edit_multipart(form, model="served"))
        kept = after if len(after) <= 2 else b"\r\n"
        wanted = FILE + part("model", b"served") if parts != FILE else part("model", b"served") + FILE
        assert edited == wanted + b"--b--" + kept


def test_white_space_after_a_boundary_is_accepted() -> None:
    body = (FILE + MODEL + END).replace(b"--b\r\nContent", b"--b \t\r\nContent")
    assert read_multipart(body, TYPE).model == "whisper"


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_line_end_after_the_model_value_is_removed(line_end: bytes) -> None:
    body = part("model", b"whisper" + line_end) + part("stream", b"true" + line_end) + END
    form = read_multipart(body, TYPE)
    assert (form.model, form.stream) == ("whisper", True)
    assert edit_multipart(form, model="whisper") == MODEL + part("stream", b"true" + line_end) + END
    refusal(part("model", b"whisper" + 2 * line_end) + END)


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
@example(parts=[FILE, MODEL, END])
def test_random_form_is_rejected_or_yields_its_model_name(parts: list[bytes]) -> None:
    body = b"".join(parts)
    try:
        form = read_multipart(body, TYPE)
    except CallError:
        assert parts != [FILE, MODEL, END]
        return
    assert body[form.start : form.end].decode().rstrip("\r\n") == form.model


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
def test_model_is_read_from_the_forms_of_common_http_clients(boundary: str, field: str, file: str) -> None:
    disposition = "Content-Disposition: form-data; name="
    body = (
        f'--{boundary}\r\n{field}{disposition}"model"\r\n\r\nwhisper\r\n'
        f'--{boundary}\r\n{disposition}"file"; filename="a b.wav"\r\n{file}\r\nRIFF\r\n--{boundary}--\r\n'
    ).encode()
    form = read_multipart(body, f"multipart/form-data; boundary={boundary}".encode())
    assert form.model == "whisper"
    assert edit_multipart(form, model="whisper") is body
