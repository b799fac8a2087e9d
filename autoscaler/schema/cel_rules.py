"""CEL versions of the rules of `autoscaler.documents.document_rules` that need only one object, enforced by the API
server.

Each rule has the message of its rule in Python; a test against a real API server compares them.

Some rules exist only in Python, because CEL cannot express them or their cost is too high. One is that for arguments
that Pilotlight sets. The others are: unknown placeholders, adapters' names that equal aliases, members and URLs of
request policies, and the form of labels, quantities and names of variables. (`env` has values of two types, which CEL
cannot read.) Rules that depend on the namespace or the Settings exist only in Python, too.
https://kubernetes.io/docs/reference/using-api/cel
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from re import Pattern

import msgspec

from autoscaler.documents.document_rules import (
    ADAPTED_NAMES_MAX,
    ADAPTED_NAMES_WANTED,
    ADAPTER,
    ADAPTER_PATH,
    ALIAS,
    ALIAS_WANTED,
    AMOUNT_RESERVED,
    CHOICE_RESERVED,
    CLAIM,
    CLAIM_WANTED,
    FILE_WANTED,
    HOST,
    MESSAGE,
    NAME_CHARS_MAX,
    PRODUCT_WANTED,
    SCHEMES,
    TRITON_ONLY,
)
from autoscaler.schema.pod_types import TYPES
from autoscaler.slicing.slicers import AMOUNTS_BEGIN, CHOICES, CHOICES_BEGIN, NETWORK_BEGIN
from autoscaler.spec.artifact_name import STORED
from autoscaler.spec.engines import ENGINES
from autoscaler.spec.installation_ownership import TITLE, TITLE_WANTED
from autoscaler.spec.pod import (
    GPU,
    OURS,
    OWN_SELECTORS,
    RESERVED,
    SELECTS,
    SOURCE_WANTED,
    THE_PLAN,
    THE_PLANS_NODE,
    VOLUME_RESERVED,
    VOLUME_WANTED,
    VOLUMES_BEGIN,
)


class Rule(msgspec.Struct, frozen=True):
    """One CEL rule over `self`. The message is a sentence, or with `says` an expression that returns one."""

    rule: str
    message: str
    at: str = ""
    """The path of the key to change, below `self`: `.replicas.min`."""
    says: bool = False
    reason: str = "FieldValueInvalid"

    def written(self) -> dict[str, str]:
        """The rule in the form of a schema."""
        message = {"messageExpression" if self.says else "message": self.message}
        return {"rule": self.rule, **message, "reason": self.reason} | ({"fieldPath": self.at} if self.at else {})


def forbid_key(key: str) -> Rule:
    """A rule that rejects a key of `self`."""
    return Rule(f"!has(self.{key})", MESSAGE, f".{key}", reason="FieldValueForbidden")


def _whole(pattern: Pattern[str]) -> str:
    """A CEL literal of a pattern that must match the whole string; RE2 interprets it as Python does."""
    return f"r'^(?:{pattern.pattern})$'"


def _list(words: Collection[str]) -> str:
    return "[" + ", ".join(f"'{word}'" for word in sorted(words)) + "]"


_NEEDS = _list({name for name, engine in ENGINES.items() if engine.artifacts != "optional-file"})
_FROM_HUB = _list({name for name, engine in ENGINES.items() if engine.artifacts == "file-or-hf"})
_ADAPTED = _list({name for name, engine in ENGINES.items() if engine.adapters is not None})
_SCHEME = f"r'^({'|'.join(sorted(SCHEMES))})://'"
_ARTIFACT_SCHEME = f"r'^({'|'.join(sorted(SCHEMES - {'pvc'}))})://'"
"""Schemes that a custom resource does not support as its artifact yet."""
_NAME_WANTED = f"expected 1 to {NAME_CHARS_MAX} letters, digits or ._:/- that begin and end with a letter or digit"
_STORED = f"r'^({'|'.join(sorted(STORED))})://'"
_FILE_ONLY = _list({name for name, engine in ENGINES.items() if engine.file_only})
_STORED_SAID = f"(!(self.engine in {_FILE_ONLY}) && self.artifact.matches({_STORED}))"


def _excludes() -> tuple[Rule, ...]:
    """Rules for arguments that an engine must not get together with adapters. (Equality and prefixes cost little.)"""
    found = {name: engine.adapters.excludes for name, engine in ENGINES.items() if engine.adapters is not None}
    return tuple(
        Rule(
            f"self.engine != '{name}' || size(self.adapters) == 0 || !self.args.exists(arg, "
            f"{_list(_spelt(flags))}.exists(flag, arg == flag || arg.startsWith(flag + '=')))",
            "not allowed with spec.adapters: it would mix up the adapters",
            ".args",
        )
        for name, flags in found.items()
        if flags
    )


def _spelt(flags: Collection[str]) -> set[str]:
    """The flags, also spelled with `_` instead of `-`."""
    inner = {flag.lstrip("-"): flag for flag in flags}
    return {*flags, *(flag.replace(word, word.replace("-", "_")) for word, flag in inner.items())}


_ARTIFACT = (
    Rule(
        f"has(self.artifact) || !(self.engine in {_NEEDS})",
        "'missing; engine ' + self.engine + ' needs one such as file:///path' + "
        f"(self.engine in {_FROM_HUB} ? ' or hf://org/name@revision' : '')",
        ".artifact",
        says=True,
    ),
    Rule(
        f"!has(self.artifact) || !self.artifact.startsWith('pvc://') || self.artifact.matches({_whole(CLAIM)})",
        CLAIM_WANTED,
        ".artifact",
    ),
    *(
        Rule(
            f"!has(self.artifact) || self.engine in {_FILE_ONLY} || !self.artifact.startsWith('{scheme}://') || "
            f"self.artifact.matches({_whole(pattern)})",
            wanted,
            ".artifact",
        )
        for scheme, (pattern, wanted) in STORED.items()
    ),
    Rule(
        f"!has(self.artifact) || {_STORED_SAID} || !self.artifact.matches({_ARTIFACT_SCHEME})",
        f"self.artifact.split('://')[0] + ':// {MESSAGE} for engine ' + self.engine",
        ".artifact",
        says=True,
        reason="FieldValueForbidden",
    ),
    Rule(
        f"!has(self.artifact) || self.artifact.matches({_SCHEME}) || "
        "(self.artifact.startsWith('file:///') && self.artifact.size() > 8)",
        FILE_WANTED,
        ".artifact",
    ),
)
_COMMAND = (
    Rule(
        "self.engine == 'command' || size(self.command) == 0",
        "'only engine `command` supports it; use `args` for engine ' + self.engine",
        ".command",
        says=True,
    ),
    Rule(
        "self.engine != 'command' || self.command.exists(word, word.contains('{port}'))",
        "expected a list of words, one of which contains {port}, the port to listen on",
        ".command",
    ),
    *(
        Rule(
            f"self.engine != 'command' || has(self.{key}) || "
            f"!self.command.exists(word, word.contains('{{{placeholder}}}'))",
            f"{{{placeholder}}} needs spec.{key}",
            ".command",
        )
        for placeholder, key in (("model_path", "artifact"), ("context_tokens", "contextTokens"))
    ),
)
_SPEC = (
    Rule("self.replicas.min <= self.replicas.max", "expected at most replicas.max", ".replicas.min"),
    Rule(
        "!has(self.replicas.schedule) || self.replicas.schedule.all(one, one.min <= self.replicas.max)",
        "expected at most replicas.max",
        ".replicas.schedule",
    ),
    *_ARTIFACT,
    Rule(
        f"size(self.adapters) == 0 || self.engine in {_ADAPTED}",
        "'engine ' + self.engine + ' does not support adapters: use a model that includes the adapter'",
        ".adapters",
        says=True,
    ),
    Rule(f"(size(self.aliases) + 1) * size(self.adapters) <= {ADAPTED_NAMES_MAX}", ADAPTED_NAMES_WANTED, ".adapters"),
    Rule(
        f"self.engine != 'command' || self.adapters.all(one, !one.artifact.matches({_STORED}))",
        f"self.adapters.filter(one, one.artifact.matches({_STORED}))[0].artifact.split('://')[0] + "
        f"':// {MESSAGE} for adapters of engine command'",
        ".adapters",
        says=True,
        reason="FieldValueForbidden",
    ),
    Rule("!has(self.triton) || self.engine == 'triton'", TRITON_ONLY, ".triton"),
    *_excludes(),
    *_COMMAND,
)


def _none_of(names: Collection[str], begin: Collection[str] = ()) -> str:
    """A CEL condition: no key of the map is in `names` or has a prefix in `begin`."""
    begins = f" && !{_list(begin)}.exists(begin, key.startsWith(begin))" if begin else ""
    return f"self.all(key, !(key in {_list(names)}){begins})"


_AMOUNTS = (
    Rule(f"!({json.dumps(GPU)} in self)", "is set by Pilotlight: use spec.gpu.count"),
    Rule(
        f"self.all(key, key == {json.dumps(GPU)} || !{_list(AMOUNTS_BEGIN)}.exists(begin, key.startsWith(begin)) || "
        f"{_list(NETWORK_BEGIN)}.exists(begin, key.startsWith(begin)))",
        AMOUNT_RESERVED,
    ),
)
_RESERVED = Rule(_none_of(RESERVED, {OURS}), THE_PLAN)
_SOURCES = " || ".join(f"has(self.{kind})" for kind in TYPES["Volume"] if not kind.startswith("name"))
_LABELS = (_RESERVED, Rule(_none_of(SELECTS), OWN_SELECTORS))
_ANNOTATIONS = (_RESERVED, Rule(_none_of(CHOICES, CHOICES_BEGIN), CHOICE_RESERVED))

RULES: Mapping[tuple[str, str], tuple[Rule, ...]] = {
    ("ModelDocument", ""): (
        Rule(
            "!(self.metadata.name in self.spec.aliases)",
            "'`' + self.metadata.name + '` is already the Model\\'s own name'",
            ".spec.aliases",
            says=True,
        ),
    ),
    ("ModelSpec", ""): _SPEC,
    ("Gpu", "models"): (Rule(r"self.all(one, one.matches(r'\S'))", PRODUCT_WANTED),),
    ("ModelSpec", "aliases[]"): (Rule(f"self.matches({_whole(ALIAS)})", ALIAS_WANTED),),
    ("ModelSpec", "readinessPath"): (Rule("self.matches(r'^/[!-~]*$')", "expected a path such as /health"),),
    ("ModelSpec", "installation"): (Rule(f"self.matches({_whole(TITLE)})", TITLE_WANTED),),
    ("EngineTls", "serverName"): (
        Rule(
            f"self.size() <= {NAME_CHARS_MAX} && self.matches({_whole(HOST)})",
            "expected a host name such as engine.example",
        ),
    ),
    ("Adapter", "name"): (
        Rule(
            f"self.matches({_whole(ADAPTER)})",
            "expected 1 to 63 letters, digits or ._- that begin and end with a letter or digit",
        ),
    ),
    ("Adapter", "artifact"): (
        Rule(
            f"self.matches({_STORED}) || !self.matches({_SCHEME})",
            f"self.split('://')[0] + ':// {MESSAGE} for adapters'",
            says=True,
            reason="FieldValueForbidden",
        ),
        *(
            Rule(f"!self.startsWith('{scheme}://') || self.matches({_whole(pattern)})", wanted)
            for scheme, (pattern, wanted) in STORED.items()
        ),
        Rule(
            f"self.matches({_SCHEME}) || self.matches({_whole(ADAPTER_PATH)})",
            "expected an absolute path such as file:///models/support.gguf; a comma, a colon, an equals sign or a "
            "double quote is not allowed in the path",
        ),
    ),
    ("Resources", "requests"): _AMOUNTS,
    ("Resources", "limits"): _AMOUNTS,
    ("Pod", "labels"): _LABELS,
    ("Pod", "annotations"): _ANNOTATIONS,
    ("Pod", ""): (
        Rule(
            "!has(self.volumeMounts) || self.volumeMounts.all(mount, "
            "has(self.volumes) && self.volumes.exists(volume, volume.name == mount.name))",
            VOLUME_WANTED,
            ".volumeMounts",
        ),
    ),
    ("Affinity", ""): (Rule("!has(self.nodeAffinity)", THE_PLANS_NODE, ".nodeAffinity", reason="FieldValueForbidden"),),
    ("Volume", "name"): (Rule(f"!self.startsWith({json.dumps(VOLUMES_BEGIN)})", VOLUME_RESERVED),),
    ("Volume", ""): (Rule(_SOURCES, SOURCE_WANTED),),
}
"""(type, key) -> its rules; an empty key: rules of the object itself; `[]`: rules of each item."""
