"""AWS request signatures, checked against the examples that AWS publishes."""

from __future__ import annotations

import calendar

import pytest
from yarl import URL

from artifacts.credentials.sigv4 import Asked, Keys, Scope, encode_uri, sign_request

SUITE = Keys("AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY")
"""Keys of the test suite and of the IAM example."""
DOCUMENTED = Keys("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
"""Keys of https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html."""
AT_2015 = calendar.timegm((2015, 8, 30, 12, 36, 0))
AT_2013 = calendar.timegm((2013, 5, 24, 0, 0, 0))
SERVICE, S3 = Scope("us-east-1", "service"), Scope("us-east-1", "s3")
EXAMPLE = "https://example.amazonaws.com"
BUCKET = "https://examplebucket.s3.amazonaws.com"


@pytest.mark.parametrize(
    ("method", "url", "headers", "signature"),
    [
        ("GET", f"{EXAMPLE}/", {}, "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31"),
        ("POST", f"{EXAMPLE}/", {}, "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b"),
        (
            "GET", f"{EXAMPLE}/?Param2=value2&Param1=value1", {},
            "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500",
        ),
    ],
)  # fmt: skip
def test_aws_test_suite_requests_have_the_published_signatures(
    method: str, url: str, headers: dict[str, str], signature: str
) -> None:
    found = sign_request(Asked(method, URL(url, encoded=True), headers), SUITE, SERVICE, AT_2015)
    assert found["Authorization"] == (
        "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/20150830/us-east-1/service/aws4_request, "
        f"SignedHeaders=host;x-amz-date, Signature={signature}"
    )
    assert found["X-Amz-Date"] == "20150830T123600Z"


def test_iam_example_has_the_published_signature() -> None:
    url = URL("https://iam.amazonaws.com/?Action=ListUsers&Version=2010-05-08", encoded=True)
    headers = {"Content-Type": "application/x-www-form-urlencoded; charset=utf-8"}
    found = sign_request(Asked("GET", url, headers), SUITE, Scope("us-east-1", "iam"), AT_2015)
    assert found["Authorization"].endswith("5d672d79c15b13162d9279b0855cfba6789a8edb4c82c400e06b5924a6f2b5d7")


@pytest.mark.parametrize(
    ("path", "headers", "signature"),
    [
        ("/test.txt", {"Range": "bytes=0-9"}, "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41"),
        ("/?lifecycle", {}, "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"),
        ("/?max-keys=2&prefix=J", {}, "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"),
        (
            "/test%24file.text",
            {"Date": "Fri, 24 May 2013 00:00:00 GMT", "x-amz-storage-class": "REDUCED_REDUNDANCY"},
            "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
        ),
    ],
)
def test_s3_examples_have_the_published_signatures(path: str, headers: dict[str, str], signature: str) -> None:
    method, body = ("PUT", b"Welcome to Amazon S3.") if "Date" in headers else ("GET", b"")
    found = sign_request(Asked(method, URL(BUCKET + path, encoded=True), headers, body), DOCUMENTED, S3, AT_2013)
    assert found["Authorization"].rpartition("=")[2] == signature
    assert found["X-Amz-Content-Sha256"].startswith("e3b0c442") is (body == b"")


def test_aws_session_token_is_sent_in_a_signed_header() -> None:
    keys = Keys("a", "s", "the-token")
    found = sign_request(Asked("GET", URL("http://127.0.0.1:9000/b/k")), keys, S3, AT_2013)
    assert found["X-Amz-Security-Token"] == "the-token"
    assert "SignedHeaders=host;x-amz-content-sha256;x-amz-date;x-amz-security-token" in found["Authorization"]
    assert "s3cret" not in repr(Keys("a", "s3cret", "t0ken"))
    assert "t0ken" not in repr(Keys("a", "s3cret", "t0ken"))


def test_uri_encoding_keeps_slashes_in_paths_and_escapes_them_elsewhere() -> None:
    assert encode_uri("a b/ü+*~.gguf", path=True) == "a%20b/%C3%BC%2B%2A~.gguf"
    assert encode_uri("a/b=c") == "a%2Fb%3Dc"
