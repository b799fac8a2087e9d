"""Generates docs/reference/engines.md from the definitions of engines: `.venv/bin/python -m docs.engines`.

tests/project/test_docs.py compares the page with what this module would write.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from autoscaler.spec.engine_definition import Engine, EngineMetrics, Sleep, Word
from autoscaler.spec.engines import ENGINES

PAGE = Path(__file__).parent / "reference" / "engines.md"
BEGINNING = """# Engines

With this page you can look up how Pilotlight starts an engine, and how the engine behaves. It is generated from
`autoscaler/spec/engines.py` (`.venv/bin/python -m docs.engines`), and a test fails if it is not current.
[Choose an engine](../how-to/engines.md) is the guide.

* Words in `[...]` are omitted if the Model does not set their value. `args` of a Model are appended.
* Flags with `{host}`, `{port}`, `{model_path}`, `{name}` and `{slots}` are rejected in `args`, and those with
  `{context_tokens}` if the Model sets `contextTokens`.
* A metric without a name, or one that a response lacks, is unknown and not zero. Pilotlight reads metrics for
  [scaling signals](../how-to/scaling-signals.md) only, and on the port of the requests only.
* Pilotlight uses no sleep endpoints of engines yet.
* Clients reach only the paths of the [HTTP API](http-api.md). All other paths of an engine are blocked, among them
  those listed here.
* APIs: `openai` is OpenAI's API without [Responses](responses-api.md), which is `responses`. `anthropic` is
  [Messages](anthropic-api.md). `jina`, `cohere`, `score`, `tei` and `sglang` are forms of [rerank](rerank-api.md).
  `vllm` is `/tokenize` and `/detokenize`.
* "Untested" means that the tests do not run the engine. They compare its command line as text, and its facts come from
  the sources that are named.

"""
TESTS = {
    "run": "run in `make test`",
    "engines": "run in `make test-engines`",
    "text": "untested",
}


def _command_line(words: tuple[Word, ...]) -> str:
    return " ".join(word if isinstance(word, str) else f"[{' '.join(word)}]" for word in words)


def _overview() -> Iterator[str]:
    yield "| engine | programs | image | default slots | readiness path | APIs | tests |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, engine in ENGINES.items():
        programs = ", ".join(f"package `{one.found}`" if one.package else f"`{one.found}`" for one in engine.programs)
        cells = (
            f"[`{name}`](#{name.replace('.', '')})", programs or "the Model's `command`",
            f"`{engine.image}`" if engine.image else "", str(engine.slots), f"`{engine.readiness_path}`",
            ", ".join(engine.dialects) or "[translated](triton-api.md)", TESTS[engine.behavior.tests],
        )  # fmt: skip
        yield f"| {' | '.join(cells)} |"


def _metrics(metrics: EngineMetrics | None) -> str:
    if metrics is None:
        return "none known"
    rows = {
        "waiting": metrics.waiting,
        "running": metrics.running,
        "cache use": metrics.cache_use,
        "tokens": metrics.tokens,
    }
    said = [f"{what}: {', then '.join(f'`{one}`' for one in names) or 'unknown'}" for what, names in rows.items()]
    if metrics.queue_time_path:
        said.append(f"time in the queue: `GET {metrics.queue_time_path}`")
    return f"`{metrics.path}`{f', with {metrics.needs}' if metrics.needs else ''}; {'; '.join(said)}"


def _sleep(sleep: Sleep | None) -> str:
    if sleep is None:
        return "none known"
    needs = f"with {sleep.needs}: " if sleep.needs else ""
    return f"{needs}{sleep.sleep}; wake: {sleep.wake}; state: {sleep.state or 'not reported'}"


def _adapters(engine: Engine) -> str:
    if engine.adapters is None:
        return "not supported"
    start = _command_line((*engine.adapters.words, engine.adapters.each)).strip()
    loading = engine.behavior.adapter_loading
    return (
        f"{f'`{start}`' if start else 'loaded by the command'}{f'; on a running engine: {loading}' if loading else ''}"
    )


def _rows(engine: Engine) -> Iterator[tuple[str, str]]:
    behavior = engine.behavior
    flags = [word for one in engine.programs for word in one.argv if not isinstance(word, str)]
    devices = next((f"`{_command_line(word)}`" for word in flags if "{gpus}" in word), "not set")
    for program in engine.programs:
        yield f"command line (`{program.found}`)", f"`{_command_line(program.argv)}`"
    env: dict[str, Word] = {name: value for one in engine.programs for name, value in one.env.items()}
    env |= engine.env
    yield "environment", ", ".join(f"`{name}={_command_line((value,))}`" for name, value in env.items()) or "none"
    yield "tensor parallelism", devices
    yield "memory", behavior.memory
    yield "adapters", _adapters(engine)
    yield "ready", f"`GET {engine.readiness_path}`: {behavior.ready_when}"
    yield "metrics", _metrics(behavior.metrics)
    yield "sleep", _sleep(behavior.sleep)
    yield "cancellation", behavior.cancellation
    yield "stop (SIGTERM)", behavior.stop
    yield "blocked paths", ", ".join(f"`{path}`" for path in behavior.native_paths) or "all but those of the HTTP API"
    if behavior.notes:
        yield "notes", behavior.notes
    yield "sources", ", ".join(f"<{one}>" if one.startswith("https://") else one for one in behavior.sources)


def _section(engine: Engine) -> Iterator[str]:
    yield from ("", f"## {engine.name}", "", "| property | value |", "| --- | --- |")
    yield from (f"| {name} | {value} |" for name, value in _rows(engine))
    if engine.platforms:
        yield from ("", "Images for other accelerators, all untested. Set the variables in `env`.", "")
        yield from ("| accelerator | image | variables | source |", "| --- | --- | --- | --- |")
        for one in engine.platforms:
            env = ", ".join(f"`{name}={value}`" for name, value in one.env.items()) or "none"
            yield f"| {one.name} | {one.image} | {env} | <{one.source}> |"


def page() -> str:
    """The whole page."""
    lines = [*_overview(), *(line for engine in ENGINES.values() for line in _section(engine))]
    return BEGINNING + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
