"""Evaluates the signatures found for a manifest against the policy: whether it may be published, and why. Pure.

With policy `enforce` it fails closed: missing, unreadable, foreign or mismatched signatures reject the manifest, and so
does an unavailable registry. One valid signature by one key or identity is enough; other signatures, which every
user with push access can add, change nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from artifacts.digest import Digest, get_algorithm, get_hex
from artifacts.signatures import bundles, certificates, payloads, timestamps, transparency_log
from artifacts.signatures.bundles import Bundle, Envelope, Message
from artifacts.signatures.certificates import Identity
from artifacts.signatures.payloads import BadClaimError
from artifacts.signatures.public_keys import SIGNATURE_BYTES_MAX, PublicKey
from artifacts.signatures.trust_root import Root

REASONS_MAX = 5


class Policy(NamedTuple):
    """Required signatures (Settings `weights.signatures`)."""

    policy: Literal["off", "warn", "enforce"] = "off"
    keys: tuple[PublicKey, ...] = ()
    identities: tuple[Identity, ...] = ()
    """Accepted identities of certificates (keyless signatures). One key or identity is enough."""
    root: Root | None = None
    """Trusted root that verifies such certificates."""


class Cosign(NamedTuple):
    """A `simplesigning` layer of a signature manifest."""

    at: str
    """Where it was found, as named in errors."""
    payload: bytes
    signature: str
    """The layer's annotation, in base64."""


class Bundled(NamedTuple):
    """A bundle that refers to the manifest."""

    at: str
    content: bytes


class Unread(NamedTuple):
    """A signature that could not be fetched or is of an unsupported kind."""

    at: str
    why: str


Found = Cosign | Bundled | Unread


class SignatureVerdict(NamedTuple):
    """Result of the evaluation."""

    publish: bool
    """Whether the weights may be used."""
    signed_by: str
    """The key or identity of the valid signature; empty if there is none or none was required."""
    lines: tuple[str, ...]
    """For users: the first line is the result, the others are reasons."""


def evaluate_signatures(digest: Digest, found: Sequence[Found], policy: Policy) -> SignatureVerdict:
    """Evaluate the signatures of the manifest with this digest."""
    if policy.policy == "off":
        return SignatureVerdict(publish=True, signed_by="", lines=(f"{digest}: signatures are not required",))
    reasons = []
    for one in found:
        try:
            signer = _signer(digest, one, policy)
        except BadClaimError as error:
            reasons.append(f"{one.at}: {error}")
            continue
        return SignatureVerdict(
            publish=True, signed_by=signer, lines=(_line(f"{digest}: signed by {signer} ({one.at})"),)
        )
    return _refused(digest, reasons or ["the registry has no signature of it"], policy)


def _refused(digest: Digest, reasons: Sequence[str], policy: Policy) -> SignatureVerdict:
    """Build the verdict for the case that no signature is valid."""
    shown = [*reasons[:REASONS_MAX], *([f"and {len(reasons) - REASONS_MAX} more"] if reasons[REASONS_MAX:] else [])]
    if policy.policy == "enforce":
        first = f"{digest}: refused: no valid signature that weights.signatures requires"
    else:
        first = f"{digest}: no valid signature that weights.signatures requires; it is used anyway (warn)"
    return SignatureVerdict(publish=policy.policy != "enforce", signed_by="", lines=(first, *map(_line, shown)))


def _signer(digest: Digest, one: Found, policy: Policy) -> str:
    """Return the signer. Raises BadClaimError."""
    if isinstance(one, Unread):
        raise BadClaimError(one.why)
    if isinstance(one, Cosign):
        signature = payloads.decode_base64(one.signature, SIGNATURE_BYTES_MAX, "its signature")
        key = _first(key for key in policy.keys if key.signed(signature, one.payload))
        payloads.check_payload(one.payload, digest)
        return f"key {key.id}"
    bundle = bundles.parse_bundle(one.content)
    if bundle.certificate is None:
        return f"key {_by(digest, bundle.content, policy.keys).id}"
    return str(_keyless(digest, bundle, bundle.certificate, policy))


def _by(digest: Digest, content: Envelope | Message, keys: Sequence[PublicKey]) -> PublicKey:
    """Return the key that signed the bundle's content, which must be about the manifest. Raises BadClaimError."""
    if isinstance(content, Message):
        if get_algorithm(digest) != "sha256" or content.sha256.hex() != get_hex(digest):
            raise BadClaimError("it signs another digest")
        return _first(key for key in keys if key.signed_sum(content.signature, content.sha256))
    signed = payloads.encode_pae(payloads.IN_TOTO, content.payload)
    key = _first(key for key in keys if key.signed(content.signature, signed))
    payloads.check_statement(content.payload, digest)
    return key


def _keyless(digest: Digest, bundle: Bundle, certificate: bytes, policy: Policy) -> Identity:
    """Verify a keyless signature and return its identity. Raises BadClaimError."""
    if policy.root is None or not policy.identities:
        raise BadClaimError("it was made with a certificate (keyless), and weights.signatures.identities is empty")
    entries, content = bundle.material.get("tlogEntries"), bundle.content
    if not isinstance(entries, list) or len(entries) != 1 or not isinstance(entries[0], dict):
        raise BadClaimError("it was made with a certificate (keyless), but does not have exactly one log entry")
    entry = transparency_log.check_log_entry(entries[0], policy.root.logs)
    times: tuple[float, ...] = () if entry.unix_s is None else (entry.unix_s,)
    times = times or timestamps.check_timestamps(bundle.material, content.signature, policy.root.stampers)
    if not all(map(entry.log.at, times)):
        raise BadClaimError("its log entry has a time at which the log was not in use")
    *_, leaf = [certificates.check_certificate(certificate, unix_s, policy.root) for unix_s in times]
    if not certificates.is_same(leaf, transparency_log.check_body(entry.body, content)):
        raise BadClaimError("its log entry is for another certificate")
    _by(digest, content, (leaf.key,))
    if leaf.identity not in policy.identities:
        raise BadClaimError(f"it is signed by {leaf.identity}, which is not in weights.signatures.identities")
    return leaf.identity


def _first(keys: Iterator[PublicKey]) -> PublicKey:
    for key in keys:
        return key
    raise BadClaimError("it is signed by none of the keys")


def _line(text: str) -> str:
    """Return printable, single-line text, since reasons contain untrusted input."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
