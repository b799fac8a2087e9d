"""Fuzz target for YAML documents: values that fit JSON and any recursive reader, or one error in one line."""

from __future__ import annotations

from random import Random
from typing import Final

from autoscaler.documents import document_types, parse, render
from autoscaler.spec import yaml
from tests.fuzz.checks.error_messages import check_line
from tests.fuzz.inputs.json_mutations import mutated

_MODEL: Final = """apiVersion: pilotlight.dev/v1alpha1
kind: Model
metadata: {name: ada, namespace: default, labels: {a: b}}
spec:
  engine: vllm
  artifact: oci://registry.example/ada:1
  args: [--x, "1"]
  env: {A: b}
  gpu: {count: 1, memory: 16Gi}
  replicas: {min: 0, max: 2}
  schedule: [{cron: "0 8 * * 1-5", timezone: Europe/Berlin, min: 1, durationSeconds: 60}]
  pod:
    affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: []}}}
    volumes: [{name: v, emptyDir: {}}]
    volumeMounts: [{name: v, mountPath: /v}]
"""
_TENANT: Final = """apiVersion: pilotlight.dev/v1alpha1
kind: Tenant
metadata: {name: team}
spec:
  keys: [{sha256: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa, name: k}]
  models: [ada]
  weight: 1.5
"""
_SETTINGS: Final = """apiVersion: pilotlight.dev/v1alpha1
kind: Settings
auth: keys
cors: {origins: ["*"]}
nodes: [{selector: {a: b}, device: {model: x, memory: 80Gi, count: 8}}]
"""
DOCUMENTS: Final = (_MODEL, _TENANT, _SETTINGS)
SEEDS: Final = (
    *(text.encode() for text in (*DOCUMENTS, "---\n".join(DOCUMENTS))),
    b"a: &a {b: 1}\nc: {<<: *a, d: *a}\n",
    b"a: &a [1]\nb: [*a, *a]\n---\n- &b {c: &d [*b]}\n",
    b"!!set {a, b}\n", b"? [a]\n: b\n", b"a: !!binary aGk=\nb: !!omap [a: 1]\nc: 2026-01-01\nd: 1:30\ne: 0o7\n",
    b'"\\ud83d\\ude00": "\\ud800"\n', b"a: |\n  x\nb: >-\n  y\nc: 'z'\n", b"{a: [{b: [{c: 1}]}]}",
)  # fmt: skip
_PLAIN: Final = tuple(value for text in DOCUMENTS for value in yaml.parse_yaml(text))
_TAGS: Final = (
    "!!null", "!!bool", "!!int", "!!float", "!!binary", "!!timestamp", "!!omap", "!!pairs", "!!set", "!!str", "!!seq",
    "!!map", "!!merge",
    "!!value", "!x", "!<tag:yaml.org,2002:int>", "!!python/object:os.system", "!!python/name:os.system", "!", "!!",
)  # fmt: skip
_SCALARS: Final = (
    "", "~", "a", "1", "-1", "0", "1.5", ".nan", ".inf", "-.inf", "1e400", "9" * 400, "9" * 5_000, "0x" + "f" * 5_000,
    "0b" + "1" * 9_000,
    "0" + "7" * 5_000, "1:" * 2_000 + "0", "1:" * 300 + "0.5", "190:20:30", "1_000", "_", "+", "-", "0x",
    "2026-01-01", "2026-99-99T99:99:99Z",
    "2026-01-01T00:00:00+99:99", "true", "yes", "<<", "=", "*", "&", '"\\ud800"', '"\\ud83d\\ude00"',
    '"\\udc00\\ud800"', '"\\x1b[31m"',
    '"\\0"', '"\\N\\_\\L\\P"', '"a\\nb"', "'x'", "é", "\u2028", "\u0085", "\u202e", "\ufeff", "\U0001f600",
    "x" * 3_000, "16Gi", "9" * 40 + "Gi",
    "aGk=", "%%%", "\t", "{}", "[]", "? ", ": ", "- ", "# x", "|", ">", "@", "`", "%YAML 1.2",
)  # fmt: skip
WORDS: Final = (
    *(word.encode() for word in (*_TAGS, *_SCALARS) if len(word) < 100),
    b"&a ", b"*a", b"<<: *a", b"---\n", b"...\n", b"{", b"}", b"[", b"]", b": ", b"- ", b"? ", b"\n", b"  ", b"\xff",
    b"\xed\xa0\x80",
)  # fmt: skip
_NAMES: Final = "abcd"
_DEPTH_MAX: Final = 6


def case(random: Random) -> bytes:
    """YAML text: a tree in flow style with tags, anchors and aliases, or a mutated Pilotlight document."""
    choice = random.random()
    if choice < 0.35:
        return _flow(random, 0).encode(errors="surrogatepass")
    if choice < 0.5:
        return _chained(random).encode()
    if choice < 0.55:
        return _tall(random).encode()
    if choice < 0.75:
        return mutated(random.choice(_PLAIN), random)
    lines = "---\n".join(random.sample(DOCUMENTS, random.randint(1, 3))).split("\n")
    for _ in range(random.randint(1, 3)):
        at = random.randrange(len(lines))
        name, colon, _ = lines[at].partition(": ")
        put = _flow(random, 3)
        lines[at] = random.choice(
            (f"{name}{colon}{put}", f"{lines[at]} {put}", put, f"{name}: {put}", f"{lines[at]}\n{lines[at]}")
        )
    return "\n".join(lines).encode(errors="surrogatepass")


def _flow(random: Random, depth: int) -> str:
    """A random node."""
    before = ""
    if random.random() < 0.15:
        before += f"&{random.choice(_NAMES)} "
    if random.random() < 0.15:
        before += f"{random.choice(_TAGS)} "
    if random.random() < 0.12:
        return f"*{random.choice(_NAMES)}"
    if depth >= _DEPTH_MAX or random.random() < 0.4:
        return before + random.choice(_SCALARS)
    inner = [_flow(random, depth + 1) for _ in range(random.randint(0, 4))]
    if random.random() < 0.4:
        return f"{before}[{', '.join(inner)}]"
    keys = [random.choice(("a", "b", "c", "<<", "name", _flow(random, _DEPTH_MAX))) for _ in inner]
    return before + "{" + ", ".join(f"{key}: {one}" for key, one in zip(keys, inner, strict=True)) + "}"


def _chained(random: Random) -> str:
    """Aliases of aliases: each line expands to several times the size of the line before."""
    merges = random.random() < 0.4
    levels, times = random.choice((2, 5, 9, 20, 300)), random.choice((1, 2, 9, 30))
    lines = ["a0: &a0 {x: 1}" if merges else "a0: &a0 [1, 2]"]
    for level in range(1, levels):
        inner = ", ".join([f"*a{level - 1}"] * times)
        lines.append(
            f"a{level}: &a{level} {{<<: [{inner}], y{level}: 1}}" if merges else f"a{level}: &a{level} [{inner}]"
        )
    random.shuffle(lines) if random.random() < 0.1 else None
    return "\n".join(lines)


def _tall(random: Random) -> str:
    """Deep nesting in one of YAML's forms."""
    levels = random.choice((10, 98, 99, 100, 101, 400, 2_000))
    return random.choice((
        "[" * levels + "]" * random.choice((levels, levels - 1, 0)), "{a: " * levels + "1" + "}" * levels,
        "- " * levels + "1",
        "".join(f"{' ' * level}a:\n" for level in range(min(levels, 400))), "? " * levels + "a",
        "!!seq [" * levels + "]" * levels,
        "&a [" * levels + "*a" + "]" * levels,
    ))  # fmt: skip


def texts(data: bytes) -> None:
    """Read a file of documents."""
    text = (
        data.decode("utf-8", "surrogatepass" if b"\xed" in data else "replace")
        if _is_text(data)
        else data.decode("latin-1")
    )
    try:
        values = yaml.parse_yaml(text)
    except yaml.YamlError as error:
        check_line(error)
        check_line(ValueError(error.in_file("a.yaml")))
        return
    assert all(map(_is_plain, values)), "no plain values"
    try:
        loaded = parse.parse_documents([("a.yaml", text)])
    except document_types.DocumentError as error:
        check_line(error)
        return
    again = parse.parse_documents([("a.yaml", render.to_yaml(loaded))])
    assert again == loaded, "written and read again it is another"


def _is_text(data: bytes) -> bool:
    try:
        data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        return False
    return True


def _is_plain(value: object) -> bool:
    """Whether it consists of JSON types. Recurses as readers do."""
    if isinstance(value, dict):
        return all(isinstance(name, str) and _is_plain(one) for name, one in value.items())
    if isinstance(value, list):
        return all(map(_is_plain, value))
    if isinstance(value, str):
        return not any("\ud800" <= letter <= "\udfff" for letter in value)
    return value is None or isinstance(value, bool | int | float)
