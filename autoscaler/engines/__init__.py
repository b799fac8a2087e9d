"""Engines as data: command lines, readiness, API dialects and behavior of llama.cpp, vLLM, SGLang, Ollama, any command.

An engine is an entry of `ENGINES`; `build_launch_command` fills it in for one model. Nothing in this package starts or
probes a process: drivers do. `autoscaler.engines.programs` contains the modules with I/O, and is not exported here.
"""

from autoscaler.engines.command_line import LaunchCommand as LaunchCommand
from autoscaler.engines.command_line import artifact_path as artifact_path
from autoscaler.engines.command_line import build_launch_command as build_launch_command
from autoscaler.engines.command_line import select_program as select_program
from autoscaler.spec.engine_definition import Engine as Engine
from autoscaler.spec.engine_definition import EngineError as EngineError
from autoscaler.spec.engines import ENGINES as ENGINES
from autoscaler.spec.engines import LLAMA_CPP as LLAMA_CPP
from autoscaler.spec.engines import default_slots as default_slots
