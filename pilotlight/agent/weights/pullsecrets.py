"""Pull secrets of the engines' namespace, read by the agent of a node as its own service account. I/O.

Owns that one question to the API server. Promises: nothing of a secret is kept or said; it is read anew for each pull.
"""

from __future__ import annotations

from pathlib import Path

from artifacts.credentials import docker_config
from artifacts.credentials.docker_config import Config


class NoSecretError(Exception):
    """A pull secret cannot be had; `str()` says which, why, and what to do."""


class PullSecrets:
    """Of one namespace; None: they may not be read here."""

    def __init__(self, namespace: str | None, kubeconfig: Path | None = None) -> None:
        self._namespace = namespace
        self._kubeconfig = kubeconfig

    async def __call__(self, name: str) -> Config:
        """Its logins. Raises NoSecretError, PolicyError."""
        if self._namespace is None:
            raise NoSecretError(
                f"pull secret {name}: this node's agent may read none: give it --pull-secrets NAMESPACE"
            )
        from autoscaler.kubernetes.api import Api, ApiError, UnreachableError
        from autoscaler.kubernetes.kubeconfig import AccessError, access  # only here: it is an extra

        try:
            async with Api(await access(self._kubeconfig)) as api:
                found = await api.get(f"/api/v1/namespaces/{self._namespace}/secrets/{name}")
        except (AccessError, UnreachableError) as error:
            raise NoSecretError(f"pull secret {name}: {error}") from None
        except ApiError as error:
            hint = ": name it in the chart's agent.pullSecrets" if error.status == 403 else ""
            raise NoSecretError(f"pull secret {name} of namespace {self._namespace}: {error.reason}{hint}") from None
        return docker_config.of_secret(found.get("type", ""), found.get("data") or {}, f"pull secret {name}")
