"""Engines as data: command lines, readiness, dialects and manners of llama.cpp, vLLM, SGLang, Ollama and any command.

An engine is an entry of `ENGINES`; `build_launch_command` fills it in for one Model. Nothing in this package starts or
probes a process: drivers do. What is installed is looked up by `autoscaler.engines.installed`, which is not part of it.
"""

from autoscaler.engines.command_line import LaunchCommand as LaunchCommand
from autoscaler.engines.command_line import artifact_path as artifact_path
from autoscaler.engines.command_line import build_launch_command as build_launch_command
from autoscaler.engines.command_line import select_program as select_program
from autoscaler.spec.engines import ENGINES as ENGINES
from autoscaler.spec.engines import LLAMA_CPP as LLAMA_CPP
from autoscaler.spec.engines import Engine as Engine
from autoscaler.spec.engines import EngineError as EngineError
from autoscaler.spec.engines import default_slots as default_slots
