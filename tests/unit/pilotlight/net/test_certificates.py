"""Files with certificates, keys and tokens: the resulting TLS contexts, and a one-line error for each invalid file."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest

from pilotlight.net import certificates
from pilotlight.net.certificates import FileError, Identity
from tests.support.net.certificates import OURS, Pair, authority, leaf, write, write_authority

TOKEN = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return write(tmp_path, "a", leaf(OURS))


def why(identity: Identity) -> str:
    """The one-line error for this identity."""
    with pytest.raises(FileError) as refused:
        certificates.build_server_context(identity)
    line = str(refused.value)
    assert "\n" not in line
    return line


def test_server_requires_tls_1_2_and_with_a_ca_also_client_certificates(pair: Pair, tmp_path: Path) -> None:
    context = certificates.build_server_context(Identity(cert=pair.cert, key=pair.key))
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    assert context.options & ssl.OP_NO_RENEGOTIATION
    assert context.verify_mode is ssl.CERT_NONE
    with_clients = Identity(cert=pair.cert, key=pair.key, ca=write_authority(tmp_path, OURS))
    assert certificates.build_server_context(with_clients).verify_mode is ssl.CERT_REQUIRED


def test_tls_client_context_always_verifies_the_server_certificate(tmp_path: Path) -> None:
    for identity in (Identity(), Identity(ca=write_authority(tmp_path, OURS))):
        context = certificates.build_client_context(identity)
        assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert len(context.get_ca_certs()) == 1, "only whom the file names is believed"


def test_certificate_and_key_load_from_one_file_with_comments(tmp_path: Path, pair: Pair) -> None:
    both = tmp_path / "both.pem"
    both.write_text(f"# für Möwe\n{pair.key.read_text()}\n{pair.cert.read_text()}")
    certificates.build_server_context(Identity(cert=both, key=both))


def test_key_of_another_certificate_is_rejected(tmp_path: Path, pair: Pair) -> None:
    other = write(tmp_path, "b", authority(OURS).issue_cert("b.example"))
    line = why(Identity(cert=pair.cert, key=other.key))
    assert line == (
        f"{other.key}: this key does not belong to the certificate {pair.cert}: use the key of this certificate"
    )


def test_missing_certificate_or_directory_as_key_is_rejected(tmp_path: Path, pair: Pair) -> None:
    removed = tmp_path / "gone.pem"
    assert why(Identity(cert=removed, key=pair.key)).startswith(f"{removed}: No such file or directory: ")
    assert why(Identity(cert=pair.cert, key=tmp_path)).startswith(f"{tmp_path}: Is a directory: ")
    assert "needed together" in why(Identity(cert=pair.cert))


def test_invalid_or_truncated_pem_files_are_rejected(tmp_path: Path, pair: Pair) -> None:
    half = tmp_path / "half.pem"
    for text in ("hello", pair.cert.read_text()[:200], ""):
        half.write_text(text)
        assert why(Identity(cert=half, key=pair.key)) == f"{half}: the file contains no usable PEM certificate"
        assert (
            why(Identity(cert=pair.cert, key=pair.key, ca=half))
            == f"{half}: the file contains no usable PEM certificate"
        )
    half.write_text(pair.key.read_text()[:100])
    assert why(Identity(cert=pair.cert, key=half)) == f"{half}: the file contains no usable PEM private key"
    half.write_bytes(b"x" * (2 << 20))
    assert why(Identity(cert=half, key=pair.key)).startswith(f"{half}: larger than 1024 KiB")


@pytest.mark.standard
def test_encrypted_key_is_rejected_without_password_prompt(tmp_path: Path, pair: Pair) -> None:
    locked = tmp_path / "locked.key"
    words = ["openssl", "pkey", "-in", str(pair.key), "-aes128", "-passout", "pass:x", "-out", str(locked)]
    subprocess.run(words, check=True, capture_output=True)
    assert why(Identity(cert=pair.cert, key=locked)).startswith(f"{locked}: the key is encrypted: decrypt it with ")


def test_private_key_readable_by_other_users_gets_a_chmod_suggestion(tmp_path: Path, pair: Pair) -> None:
    assert certificates.list_exposed_files(pair.key, None, tmp_path / "gone") == []
    pair.key.chmod(0o644)
    (line,) = certificates.list_exposed_files(pair.key, pair.key)
    assert line == f"{pair.key} can be read by other users of this machine: chmod 600 {pair.key}"


def test_token_file_with_several_lines_gives_one_token_per_line(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n\n  {TOKEN[::-1]}\n")
    assert certificates.load_tokens(path) == (TOKEN, TOKEN[::-1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file contains no token"),
        (" \n", "the file contains no token"),
        ("short\n", "32 or more visible"),
        (f"{TOKEN}\nsecond one with blanks in it, long enough\n", "32 or more visible"),
        (f"{TOKEN}\n" * 17, "more than 16 tokens"),
    ],
)
def test_invalid_token_is_rejected_without_appearing_in_the_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    with pytest.raises(FileError) as refused:
        certificates.load_tokens(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert message in str(refused.value)
    assert not any(word in str(refused.value) for word in (TOKEN, "short", "blanks"))
