"""Converts a command line of llama-swap to the engine of a Model. Pure.

Pilotlight chooses ports, so a fixed port in the command is replaced; a command without a recognizable port has no
equivalent. A llama-server with a weights file becomes engine `llama.cpp`, which sets file, host, port, name, slots and
context itself. The number of visible devices becomes `gpu.count`.
"""

from __future__ import annotations

import re
from functools import partial
from typing import NamedTuple

from autoscaler.importers.command_line import CommandLine, split_command
from autoscaler.importers.decode import parse_count
from autoscaler.importers.result import ConversionError, Sketch
from autoscaler.spec.engine_definition import PLACEHOLDER

PORT = "{port}"


AT_ONCE = 10
"""Default number of concurrent requests to one model of llama-swap."""
DEVICES = "CUDA_VISIBLE_DEVICES"
LOCAL = frozenset({"localhost", "127.0.0.1", "[::1]", "0.0.0.0"})  # noqa: S104  only compared
EXTRA_FLAGS = frozenset(
    {
        "--gpu-layers",
        "--threads",
        "--batch-size",
        "--ubatch-size",
        "--cache-ram",
        "--embeddings",
        "--reranking",
        "--warmup",
        "--mmproj",
    }
)
"""Flags of llama-server that the `llama` extra supports, too."""
LONG = {
    **dict.fromkeys(("-ngl", "--n-gpu-layers"), "--gpu-layers"), "-t": "--threads", "-b": "--batch-size",
    "-ub": "--ubatch-size", "-cram": "--cache-ram", "--embedding": "--embeddings", "--rerank": "--reranking",
    "-mm": "--mmproj",
}  # fmt: skip
KEY_FLAGS = ("--api-key", "--api-key-file")
KEY_VARIABLES = ("LLAMA_API_KEY", "VLLM_API_KEY")
"""Variables with the key that llama-server and vLLM require of clients."""
NO_KEYS = "clients' keys are not passed to engines: define keys in Tenant documents"
_ENGINE = re.compile(r"(?:^|[/:_-])(?:llama[-_.]?(?:server|cpp)|vllm|sglang)", re.IGNORECASE)
"""A program or image whose `--api-key` is the key that it requires of clients."""
RUNTIMES = frozenset({"docker", "podman", "nerdctl"})
_PUBLISHED = re.compile(r"((?:-p|--publish=)?)(\{port\}:(?:[0-9]+|\{port\})(?:/tcp)?)")
_FLAG = re.compile(r"--?[a-zA-Z]")
_SERVER = re.compile(r"(?:.*/)?llama-server(?:[-_.][\w.-]*)?")
_PROXY = re.compile(r"(https?)://(\[[^\]]+\]|[^/:]+)(?::(\d+|\{port\}))?(/.*)?")


class Command(NamedTuple):
    """How llama-swap runs a model's process. Macros are expanded; `{port}` stands for the port."""

    cmd: str
    proxy: str
    env: tuple[str, ...]
    served_name: str
    at_once: int


def strip_comments(cmd: str) -> tuple[str, list[str]]:
    """Return a command in one line without its comments, and the comments. As in a shell, `#` at the beginning of a
    word begins a comment, unless it is quoted.
    """
    lines, comments, quote = list[str](), list[str](), ""
    for line in (each.strip() for each in cmd.splitlines()):
        end, quote = _find_comment(line, quote)
        comments += [line[end:].lstrip("# ")] if end < len(line) else []
        lines.append(line[:end].rstrip().removesuffix("\\"))
    return " ".join(line for line in lines if line), comments


def _find_comment(line: str, quote: str) -> tuple[int, str]:
    """Return where a comment begins in a line, or the length of the line, and the quote that is open at its end.
    `quote`: the one that is open at its begin, or an empty string.
    """
    is_escaped, before = False, " "
    for position, letter in enumerate(line):
        if is_escaped:
            is_escaped = False
        elif letter == "\\" and quote != "'":
            is_escaped = True
        elif quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "#" and before.isspace():
            return position, quote
        before = letter
    return len(line), quote


def report_comments(comments: list[str], sketch: Sketch) -> None:
    """Report comments with the flags in them, but not with values, which may be secret."""
    if comments:
        words = (word for comment in comments for word in comment.split())
        flags = dict.fromkeys(word.partition("=")[0] for word in words if _FLAG.match(word))
        named = f", with {', '.join(flags)}" if flags else ""
        sketch.tell("cmd", f"the text from # to the end of its line is a comment and left out{named}")


def write_engine_spec(command: Command, folder: str, sketch: Sketch) -> None:
    """Write the engine of the Model. Raises ConversionError; ValueError if `cmd` cannot be split into words."""
    cmd, comments = strip_comments(command.cmd)  # a second time, since macros may contain comments
    report_comments(comments, sketch)
    words = split_command(cmd)
    if not words:
        raise ConversionError("cmd: expected the command that starts the engine")
    if "${PID}" in cmd:
        raise ConversionError("cmd: ${PID} is known only in cmdStop: remove it")
    environment, marked = _environment(command.env, sketch)
    words = _listening([*marked, *words], command.proxy, sketch)[len(marked) :]
    flags = CommandLine(words[1:])
    if _SERVER.fullmatch(words[0]) and flags.has("-m", "--model"):
        _llama_cpp(words[0], flags, folder, sketch)
        if command.at_once:
            sketch.tell("concurrencyLimit", "requests above spec.slots wait; spec.queue.callsMax limits their number")
    else:
        words = _local_container(_without_keys(words, sketch), sketch)
        _command([*marked, *words], command, sketch)
    sketch.spec["env"] = environment


def _without_keys(words: list[str], sketch: Sketch) -> list[str]:
    """Return a command without the keys that its engine would require: gateways send no keys to engines."""
    if not any(_ENGINE.search(word) for word in words):
        if CommandLine(words).has(*KEY_FLAGS):
            sketch.tell("cmd --api-key", f"it is kept, since the program is not known: {NO_KEYS}")
        return words
    line = CommandLine(words)
    if line.take(*KEY_FLAGS) is not None:
        sketch.tell("cmd --api-key", f"removed: {NO_KEYS}")
    for name in KEY_VARIABLES:
        if line.take("-e", "--env", when=partial(_is_variable, name)) is not None:
            sketch.tell(f"cmd {name}", f"removed: {NO_KEYS}")
    return line.left


def _local_container(words: list[str], sketch: Sketch) -> list[str]:
    """Return a command that runs a container, with its port on 127.0.0.1 only and the devices chosen by Pilotlight."""
    runtime = next((at for at, word in enumerate(words) if word.rpartition("/")[2] in RUNTIMES), len(words))
    run = next((at for at, word in enumerate(words) if word == "run" and at > runtime), 0)
    if not run or "compose" in words[runtime:run]:
        return words
    line = CommandLine(words)
    devices = line.take("--gpus", when=lambda value: "device=" in value)
    if devices is not None:
        chosen = devices.strip("'\"").partition("device=")[2].split(",")
        count = next((at for at, one in enumerate(chosen) if "=" in one), len(chosen))
        sketch.spec["gpu"] = {"count": count}
        sketch.tell("cmd --gpus", f"Pilotlight chooses the devices; spec.gpu.count is {count}")
        line.left[run + 1 : run + 1] = ["--gpus", "all"]
    return [_PUBLISHED.sub(r"\g<1>127.0.0.1:\2", word) if _PUBLISHED.fullmatch(word) else word for word in line.left]


def _is_variable(name: str, word: str) -> bool:
    return word.partition("=")[0] == name


def _environment(entries: tuple[str, ...], sketch: Sketch) -> tuple[dict[str, str], list[str]]:
    """Return (variables whose values do not contain the port, leading words `env NAME={port}` for the others)."""
    pairs = {name: value for name, _, value in (entry.partition("=") for entry in entries)}
    visible = pairs.pop(DEVICES, None)
    if visible is not None:
        count = 0 if visible in ("", "-1") else visible.count(",") + 1
        sketch.spec["gpu"] = {"count": count}
        sketch.tell(f"env {DEVICES}", f"Pilotlight chooses the devices; spec.gpu.count is {count}")
    for name in KEY_VARIABLES:
        if pairs.pop(name, None) is not None:
            sketch.tell(f"env {name}", f"removed: {NO_KEYS}")
    ports = [f"{name}={value}" for name, value in pairs.items() if PORT in value]
    return {name: value for name, value in pairs.items() if PORT not in value}, (["env", *ports] if ports else [])


def _listening(words: list[str], proxy: str, sketch: Sketch) -> list[str]:
    """Return the words with `{port}` in place of the port. Raises ConversionError."""
    found = _PROXY.fullmatch(proxy)
    if found is None or found[2] not in LOCAL:
        raise ConversionError("proxy: expected http://127.0.0.1:${PORT}: engines on other hosts are not supported yet")
    if (found[4] or "/") != "/":
        raise ConversionError("proxy: a path is not supported: configure the engine to serve /v1/...")
    if found[1] == "https":
        sketch.spec["tls"] = {"serverName": "localhost"} if found[2] == "localhost" else {}
    port = found[3] or "80"
    if port != PORT:
        fixed = re.compile(rf"((?:.*[=:])?){port}((?::.*)?)")
        matches = (fixed.fullmatch(word) for word in words)
        alone = re.compile(rf"(?<![0-9]){port}(?![0-9])")  # both sides of 9000:9000
        words = [word if m is None else alone.sub(PORT, word) for word, m in zip(words, matches, strict=True)]
    if not any(PORT in word for word in words):
        raise ConversionError("cmd: the port was not found: pass it as ${PORT}, as a separate word or after = or :")
    return words


def _llama_cpp(program: str, flags: CommandLine, folder: str, sketch: Sketch) -> None:
    """Write engine `llama.cpp`, without the flags that Pilotlight sets itself."""
    spec = sketch.spec
    path = flags.take("-m", "--model") or ""
    if not path.startswith("/"):
        sketch.tell("cmd --model", f"the path is relative: it is resolved in {folder}")
        path = f"{folder.rstrip('/')}/{path}"
    for own in (("--port",), ("--host",), ("-a", "--alias")):
        flags.take(*own)
    flags.take_switch("--metrics", "--slots", "--offline")
    if flags.take(*KEY_FLAGS) is not None:
        sketch.tell("cmd --api-key", f"removed: {NO_KEYS}")
    slots = _number(flags.take("-np", "--parallel"), "cmd --parallel")
    context = _number(flags.take("-c", "--ctx-size"), "cmd --ctx-size")
    spec |= {"engine": "llama.cpp", "artifact": f"file://{path}", "slots": slots or 1}
    if context:
        spec["contextTokens"] = max(1, context // (slots or 1))
    if not slots:
        sketch.tell("cmd", "it has no --parallel, so spec.slots is 1; each further slot needs memory for contextTokens")
    flags.left = [LONG.get(word, word) for word in flags.left]
    layers = flags.take("--gpu-layers")
    if layers == "0":
        spec["gpu"] = {"count": 0}
    elif layers is not None:
        flags.left += ["--gpu-layers", layers]
    spec["args"] = flags.left
    if any(_FLAG.match(word) and word not in EXTRA_FLAGS for word in flags.left):
        sketch.tell("cmd", "Pilotlight's llama extra does not support all of these args: install Pilotlight without it")
    if program != "llama-server":
        sketch.tell(
            f"cmd {program}", "Pilotlight starts the `llama-server` that it finds on the PATH: add this program there"
        )


def _command(words: list[str], command: Command, sketch: Sketch) -> None:
    """Write engine `command`: `command` ends with the last placeholder, since `args` are passed unchanged."""
    name = command.served_name
    if name:
        words = [
            "{name}" if word == name and before == "--served-model-name" else word
            for before, word in zip(["", *words], words, strict=False)
        ]
        if "{name}" not in words:
            sketch.tell(
                "useModelName", f"requests contain the Model's name: configure the engine to serve {sketch.name}"
            )
    last = max(position for position, word in enumerate(words) if PLACEHOLDER.search(word))
    sketch.spec |= {"engine": "command", "command": words[: last + 1], "args": words[last + 1 :]}
    sketch.spec["slots"] = command.at_once or AT_ONCE
    if "gpu" not in sketch.spec:
        sketch.tell("cmd", "a command gets a whole device: set spec.gpu.memory if it needs less, or count: 0 if none")


def _number(text: str | None, key: str) -> int:
    return parse_count(text, key) if text is not None and text.isascii() and text.isdecimal() else 0
