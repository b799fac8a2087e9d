"""Replaces references to variables and files in the text values of a document. Pure: the caller reads files.

- `${NAME}` and `${NAME:-default}` anywhere in a text: an environment variable. The default counts if the variable is
  not set or empty, as in a shell. `$${` is the text `${`.
- `file:/path` as the whole value of a key in `_is_file_key`: the content of a file, without one line end at its end.
  The path may contain variables. `file://` is not such a reference, because artifacts begin with it.

A value that replaces a reference is not searched for further references. Errors and notes contain references as they
are written, never their values, which may be secret.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial

from autoscaler.spec.decode import Path, WrongKeyError

VALUES_CHARS_MAX = 1 << 20
"""The maximum length of all values that replace references in the documents of one start or reload."""
FILE, ARTIFACT = "file:", "file://"
_REFERENCE = re.compile(r"\$\$\{|\$\{(?:([A-Za-z_][A-Za-z0-9_]*)(?:(:-)([^}]*))?\})?")
_SURROGATE = re.compile("[\ud800-\udfff]")
"""Python decodes bytes that are not UTF-8 to these."""

Written = Mapping[Path, str]
"""Key path -> the text with references, as it is in the document."""


class References:
    """Resolves the references of several documents."""

    def __init__(self, environ: Mapping[str, str], read_file: Callable[[str], str]) -> None:
        """`read_file` returns the content of a file, or raises ValueError with the reason."""
        self._environ = environ
        self._read_file = read_file
        self._left = VALUES_CHARS_MAX
        self.values: dict[str, str] = {}
        """Each value, and each text with values, -> as it is written."""

    def resolve(self, document: object) -> tuple[object, dict[Path, str]]:
        """Return the document with values in place of references, and the texts that had references. Raises
        WrongKeyError with the path of the value.
        """
        written = dict[Path, str]()
        kind = document.get("kind") if isinstance(document, dict) else None
        return self._value(document, str(kind), (), written), written

    def _value(self, value: object, kind: str, at: Path, written: dict[Path, str]) -> object:
        if isinstance(value, dict):
            return {key: self._value(one, kind, (*at, key), written) for key, one in value.items()}
        if isinstance(value, list):
            return [self._value(one, kind, (*at, position), written) for position, one in enumerate(value)]
        if not isinstance(value, str):
            return value
        is_file = _is_file_key(kind, at) and value.startswith(FILE) and not value.startswith(ARTIFACT)
        if not is_file and "${" not in value:
            return value
        written[at] = value
        resolved = self._content(value, at) if is_file else self._expanded(value, at)
        self._note(resolved, value)
        return resolved

    def _content(self, reference: str, at: Path) -> str:
        path = self._expanded(reference.removeprefix(FILE), at)
        if not path.startswith("/"):
            raise WrongKeyError(at, f"{reference}: expected {FILE} and an absolute path, such as file:/run/secrets/x")
        try:
            content = self._read_file(path)
        except ValueError as error:
            raise WrongKeyError(at, f"{reference}: {error}") from None
        self._count(content, at)
        return content[:-2] if content.endswith("\r\n") else content.removesuffix("\n")

    def _expanded(self, text: str, at: Path) -> str:
        return _REFERENCE.sub(partial(self._variable, at), text)

    def _variable(self, at: Path, found: re.Match[str]) -> str:
        if found[0] == "$${":
            return "${"
        name = found[1]
        if name is None:
            raise WrongKeyError(at, "expected ${NAME} or ${NAME:-default}; for the text ${ write $${")
        value = self._environ.get(name)
        if found[2] is not None:
            value = value or found[3]
        if value is None:
            raise WrongKeyError(at, f"the environment variable {name} is not set: set it, or use ${{{name}:-default}}")
        if _SURROGATE.search(value):
            raise WrongKeyError(at, f"the environment variable {name} is not UTF-8")
        self._count(value, at)
        self._note(value, found[0])
        return value

    def _note(self, value: str, written: str) -> None:
        self.values[value] = min(written, self.values.get(value, written))  # independent of the order of documents

    def _count(self, value: str, at: Path) -> None:
        self._left -= len(value)
        if self._left < 0:
            limit = f"{VALUES_CHARS_MAX >> 20} million characters"
            raise WrongKeyError(at, f"the values of all references have more than {limit}")


def _is_file_key(kind: str, at: Path) -> bool:
    """Whether the value of this key may be read from a file: environment variables of engines, hashes of API keys, and
    public keys of signatures.
    """
    match (kind, *at):
        case (
            ("Model", "spec", "env", _)
            | ("Tenant", "spec", "keys", _, "sha256")
            | ("Settings", "weights", "signatures", "keys", _)
        ):
            return True
        case _:
            return False


def hide_values(text: str, values: Mapping[str, str]) -> str:
    """Return a message with references as they are written in place of their values, where these are whole words."""
    for value in sorted(values, key=len, reverse=True):
        if value and value in text:
            written = values[value].replace("\\", r"\\")
            text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", written, text)
    return text


def restore(value: object, written: Written, at: Path = ()) -> object:
    """Return a value of a document for a reader who resolves references: values are replaced by their references as
    they were written, and other texts stand for themselves. `at` is the path of the value.
    """
    if at in written:
        return written[at]
    if isinstance(value, dict):
        return {key: restore(one, written, (*at, key)) for key, one in value.items()}
    if isinstance(value, list):
        return [restore(one, written, (*at, position)) for position, one in enumerate(value)]
    return value.replace("${", "$${") if isinstance(value, str) else value
