"""Composes the driver of a cluster: who lets us in, and how an engine is started in a pod.

Owns the one error where the extra is missing. In a pod the engine's program is its image's, found on the PATH there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import click

from autoscaler import engines
from autoscaler.drivers.base import Driver
from autoscaler.model import Model

IN_IMAGES = {"llama-server": "llama-server", "vllm": "vllm", "ollama": "ollama", "sglang": "python3"}
"""Programs as the engines' own images have them."""


@asynccontextmanager
async def driver(namespace: str, kubeconfig: Path | None, clock: Callable[[], float]) -> AsyncIterator[Driver]:
    """Raises click's usage error where the extra is not installed."""
    try:
        from autoscaler.drivers.kubernetes.access import access
        from autoscaler.drivers.kubernetes.api import Api
        from autoscaler.drivers.kubernetes.driver import KubernetesDriver
    except ModuleNotFoundError as error:
        raise click.UsageError(
            f"--driver kubernetes needs the extra: pip install 'pilotlight[kubernetes]' ({error.name} is missing)"
        ) from None
    async with Api(await access(kubeconfig)) as api:
        yield KubernetesDriver(api, namespace, launch, image, clock)


def launch(model: Model, host: str, port: int) -> engines.Launch:
    """How its engine is started in a pod. Raises EngineError, also where no image is named."""
    image(model)
    return engines.launch(model, None, host, port, IN_IMAGES, gpus=True)


def image(model: Model) -> str:
    """Of its pods. Raises EngineError."""
    if not model.spec.image:
        raise engines.EngineError(f"Model {model.name}: spec.image: name the image that has the engine")
    return model.spec.image
