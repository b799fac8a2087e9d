"""The tutorials for one machine: every command and program of a page runs, in the order of the page.

Each worker has a network of its own, so the default ports are free. The page's folders for models and programs and the
home folder are replaced by temporary ones. Ollama is not installed here: a stand-in on the PATH prints the recorded
output of `ollama show --modelfile`, and a folder contains what Ollama stores for a pulled model.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.tutorial import TUTORIALS, Reader, commands

pytestmark = pytest.mark.standard


@pytest.fixture
def reader() -> Iterator[Reader]:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    with tempfile.TemporaryDirectory(prefix="pilotlight-") as folder:  # short: its state directory holds Unix sockets
        yield Reader(Path(folder))


def test_each_command_of_the_one_machine_tutorial_succeeds(reader: Reader) -> None:
    with reader.following("one-machine.md") as page:
        demo, make_models, serve, call, serve_documents, plan, make_key, serve_with_gateways = page["sh"]
        (program,) = page["python"]
        assert demo == "make demo\n"
        reader.omit(demo)  # test_demo executes it
        reader.run(make_models)
        with reader.serving(serve):
            assert "This is what Ada says." in reader.run(call)
            assert reader.run_program(program).strip() == "This is what Ada says."
            (session,) = page["console"]
            for command in commands(session):
                assert "ada" in reader.run(command)
        with reader.serving(serve_documents):
            assert "This is what Ada says." in reader.run(call)
            assert "And these are the words of Bob." in reader.run(call.replace('"ada"', '"bob"'))
            assert "This is what Ada says." in reader.run(call)
        assert "ada" in reader.run(plan)
        key = reader.run(make_key)
        assert "acme" in key
        with reader.serving(serve_with_gateways):
            secret = re.search(r"\bpl-\S+", key)
            assert secret is not None
            assert "This is what Ada says." in reader.run(f"{call.strip()} -H 'Authorization: Bearer {secret[0]}'")


def test_each_command_of_the_one_gpu_tutorial_succeeds(reader: Reader) -> None:
    """With the simulated NVIDIA driver, as on a machine without a GPU."""
    with reader.following("one-gpu.md") as page:
        simulate, make_models, clean_up = page["sh"]
        (documents,) = page["yaml"]
        serve, calls, kill = (commands(session) for session in page["console"])
        reader.export(simulate)
        reader.run(make_models)
        reader.write("models.yaml", documents)
        with reader.serving(serve[0]):
            call_ada, status, call_bob, status_again = calls
            assert "Hello, I am Ada" in reader.run(call_ada)
            assert re.search(r"^ada +ready +1 ready .*GPU-51313131", reader.run(status), re.MULTILINE)
            assert "Good day, my name is Bob" in reader.run(call_bob)
            assert re.search(r"^bob +ready +1 ready .*GPU-51313131", reader.run(status_again), re.MULTILINE)
            kill_bob, call_bob_again = kill
            reader.run(kill_bob)
            assert "Good day, my name is Bob" in reader.run(call_bob_again)
        output = (reader.folder / "serve.log").read_text()
        reader.run(clean_up)
        assert re.search(r"ada +draining +make room for bob", output)
        assert re.search(r"bob +failed +was killed by SIGKILL", output)


def test_each_command_of_the_llama_swap_tutorial_succeeds(reader: Reader) -> None:
    """With a tiny model, and a program for `speech` that is not started, because the page sends it no request."""
    with reader.following("from-llama-swap.md") as page:
        (convert,) = page["sh"]
        save, demand, plan, serve, list_models = (line for session in page["console"] for line in commands(session))
        reader.make_model("models/coder.gguf", "This is what the coder says.")
        reader.write("opt/whisper-server", "#!/bin/sh\n", 0o755)
        reader.write("config.yaml", page["yaml"][0])
        assert "name: coder" in reader.run(convert)
        reader.run(save)
        documents = list(yaml.safe_load_all((reader.folder / "models.yaml").read_text()))
        text = (TUTORIALS / "from-llama-swap.md").read_text()
        (memory,) = re.findall(r"set `gpu: (\{.*?\})` in the `spec` of `speech`", text)
        documents[-1]["spec"]["gpu"] = yaml.safe_load(memory)
        reader.write("models.yaml", yaml.safe_dump_all(documents))
        reader.run(demand)
        assert {"coder", "speech"} <= set(reader.run(plan).split())
        with reader.serving(serve):
            names = {model["id"] for model in json.loads(reader.run(list_models))["data"]}
            assert names == {"coder", "speech"}
            assert "This is what the coder says." in reader.run(
                list_models.replace("/models", "/chat/completions -H 'Content-Type: application/json'")
                + """ -d '{"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "Hello"}]}'"""
            )


def test_each_command_of_the_ollama_tutorial_succeeds(reader: Reader) -> None:
    reader.words = {"NAME": "pirate"}
    with reader.following("from-ollama.md") as page:
        (convert,) = page["sh"]
        save, save_all, save_one, serve, call = (line for session in page["console"] for line in commands(session))
        reader.write("pirate.Modelfile", page["dockerfile"][0])
        weights = make_ollama_store(reader)
        reader.write(".venv/bin/ollama", f"#!/bin/sh\ncat <<'END'\n{OLLAMA_SHOW}FROM {weights}\nEND\n", 0o755)
        reader.make_model("models/pirate.gguf", "Ahoy from the file of a Modelfile.")
        assert "name: pirate" in reader.run(convert)
        for command, answer in (
            (save, "Ahoy from the file of a Modelfile."),
            (save_all, "Ahoy from the store."),
            (save_one, "Ahoy from the store."),
        ):
            reader.run(command)
            with reader.serving(serve):
                assert answer in reader.run(call)


OLLAMA_SHOW = """\
# Modelfile generated by "ollama show"
# To build a new Modelfile based on this, replace FROM with:
# FROM pirate:latest

"""


def make_ollama_store(reader: Reader) -> Path:
    """Writes what Ollama stores for the pulled model `pirate`; returns the file with its weights."""
    store = Path(".ollama/models")
    layers = [{"mediaType": "application/vnd.ollama.image.model", "digest": "sha256:aa"}]
    reader.write(str(store / "manifests/registry.ollama.ai/library/pirate/latest"), json.dumps({"layers": layers}))
    return reader.make_model(str(store / "blobs/sha256-aa"), "Ahoy from the store.")
