"""Signatures of a manifest: what was found, whose keys count -> whether it may be published, and why. Pure.

Owns the verdict. With policy `enforce` it fails closed: what is missing, unreadable, by somebody else or over something
else is a no, and so is a registry that could not say. One good signature by one of the keys is enough; whatever else
lies beside it, which anybody who may push could have put there, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from artifacts import bundles, claims, digests
from artifacts.bundles import Message
from artifacts.claims import BadClaimError
from artifacts.digests import Digest
from artifacts.publickeys import SIGNATURE_BYTES_MAX, Key

REASONS_MAX = 5
KEYLESS = (
    "it was made with a certificate (keyless), and this version checks only signatures by keys: sign with "
    "`cosign sign --key`, too"
)


class Policy(NamedTuple):
    """What is asked of signatures (Settings `weights.signatures`)."""

    policy: Literal["off", "warn", "enforce"] = "off"
    keys: tuple[Key, ...] = ()
    """One of them is enough."""


class Cosign(NamedTuple):
    """A layer `simplesigning` of a manifest of signatures."""

    at: str
    """Where it was found, as errors call it."""
    payload: bytes
    signature: str
    """Its annotation: base64."""


class Bundled(NamedTuple):
    """A bundle that refers to the manifest."""

    at: str
    content: bytes


class Unread(NamedTuple):
    """One that is there and could not be had, or none of a kind that is read."""

    at: str
    why: str


Found = Cosign | Bundled | Unread


class Verdict(NamedTuple):
    """What comes of it."""

    publish: bool
    """Whether the weights may be used."""
    signed_by: str
    """The key that holds; empty: none does, or nobody asked."""
    lines: tuple[str, ...]
    """For people: the first says what is, the others why."""


def judge(digest: Digest, found: Sequence[Found], policy: Policy) -> Verdict:
    """Of a manifest with that digest."""
    if policy.policy == "off":
        return Verdict(publish=True, signed_by="", lines=(f"{digest}: signatures are not asked for",))
    reasons = []
    for one in found:
        try:
            key = _key(digest, one, policy.keys)
        except BadClaimError as error:
            reasons.append(f"{one.at}: {error}")
            continue
        return Verdict(publish=True, signed_by=key.id, lines=(f"{digest}: signed by key {key.id} ({one.at})",))
    return _refused(digest, reasons or ["the registry has no signature of it"], policy)


def _refused(digest: Digest, reasons: Sequence[str], policy: Policy) -> Verdict:
    """That no signature holds."""
    shown = [*reasons[:REASONS_MAX], *([f"and {len(reasons) - REASONS_MAX} more"] if reasons[REASONS_MAX:] else [])]
    if policy.policy == "enforce":
        first = f"{digest}: refused: no signature by a key of weights.signatures.keys holds"
    else:
        first = f"{digest}: no signature by a key of weights.signatures.keys holds; it is used all the same (warn)"
    return Verdict(publish=policy.policy != "enforce", signed_by="", lines=(first, *map(_line, shown)))


def _key(digest: Digest, one: Found, keys: Sequence[Key]) -> Key:
    """The key by which it is signed. Raises BadClaimError."""
    if isinstance(one, Unread):
        raise BadClaimError(one.why)
    if isinstance(one, Cosign):
        signature = claims.decoded(one.signature, SIGNATURE_BYTES_MAX, "its signature")
        key = _first(key for key in keys if key.signed(signature, one.payload))
        claims.check_payload(one.payload, digest)
        return key
    bundle = bundles.parse(one.content)
    if bundle.certificate is not None:
        raise BadClaimError(KEYLESS)
    content = bundle.content
    if isinstance(content, Message):
        if digests.algorithm(digest) != "sha256" or content.sha256.hex() != digests.encoded(digest):
            raise BadClaimError("it is over another digest")
        return _first(key for key in keys if key.signed_sum(content.signature, content.sha256))
    signed = claims.pae(claims.IN_TOTO, content.payload)
    key = _first(key for key in keys if key.signed(content.signature, signed))
    claims.check_statement(content.payload, digest)
    return key


def _first(keys: Iterator[Key]) -> Key:
    for key in keys:
        return key
    raise BadClaimError("it is by none of the keys")


def _line(text: str) -> str:
    """One line, whatever strangers wrote."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
