"""Loads the API server's address and credentials from a kubeconfig or the pod's service account. I/O.

The official client (`kubernetes.aio`) reads the credentials: certificates, renewed tokens, exec plug-ins. The token is
read again for each request, so that a token renewed on disk is used at once.
"""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from kubernetes.aio import client


DEFAULT = "~/.kube/config"
EXTRA_FIX = (
    'pip install "$(ls dist/pilotlight-*.whl)[kubernetes]" (`make wheel` in a clone of the repository builds the wheel)'
)


MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, yaml.YAMLError)
"""Exceptions that the official client raises for a file that is not a kubeconfig."""


class ApiAccessError(Exception):
    """Credentials are missing or unreadable; `says` is the problem, with the searched locations."""

    def __init__(self, says: str, fix: str = "pass --kubeconfig, or run in a pod") -> None:
        super().__init__(f"{says}: {fix}")
        self.says, self.fix = says, fix


class ApiAccess:
    """The address of an API server, its trusted CA, and our credentials."""

    def __init__(self, configuration: client.Configuration) -> None:
        self._configuration = configuration
        self.server: str = configuration.host.rstrip("/")

    def tls(self) -> ssl.SSLContext | bool:
        """The TLS context: how the server is verified, and our client certificate, if any. False: no TLS."""
        of = self._configuration
        if not self.server.startswith("https:"):
            return False
        context = ssl.create_default_context(cafile=of.ssl_ca_cert)
        if of.cert_file:
            context.load_cert_chain(of.cert_file, keyfile=of.key_file)
        if not of.verify_ssl:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    async def headers(self) -> dict[str, str]:
        """The authorization header of the next request."""
        token = await self._configuration.get_api_key_with_prefix("BearerToken")
        return {"Authorization": token} if token else {}


async def load_api_access(kubeconfig: Path | None = None) -> ApiAccess:
    """Load from a file, else the pod's service account, else kubectl's default locations. Raises ApiAccessError."""
    try:
        from kubernetes.aio import client, config  # imported here because it is an optional extra
        from kubernetes.aio.config import ConfigException
    except ModuleNotFoundError as error:
        raise ApiAccessError(f"the extra `kubernetes` is not installed ({error.name} is missing)", EXTRA_FIX) from None
    load_kube_config: Callable[..., Awaitable[None]] = config.load_kube_config
    load_incluster_config: Callable[..., None] = config.load_incluster_config
    configuration = client.Configuration()
    try:
        if kubeconfig is not None:
            await load_kube_config(_there(str(kubeconfig), str(kubeconfig)), client_configuration=configuration)
        else:
            try:
                load_incluster_config(client_configuration=configuration)
            except ConfigException:
                await load_kube_config(_kubectl_paths(), client_configuration=configuration)
    except (ConfigException, OSError, *MALFORMED) as error:
        where = kubeconfig or "the pod's service account, $KUBECONFIG or ~/.kube/config"
        why = f"it is not a kubeconfig ({type(error).__name__})" if isinstance(error, MALFORMED) else error
        raise ApiAccessError(f"found no access to a Kubernetes API server in {where}: {why}") from error
    return ApiAccess(configuration)


def _kubectl_paths() -> str:
    """The paths in $KUBECONFIG, else the default path. Raises ApiAccessError."""
    paths = os.environ.get("KUBECONFIG", "")
    return _there(paths, "any path of $KUBECONFIG") if paths else _there(DEFAULT, DEFAULT)


def _there(paths: str, shown: str) -> str:
    """Return `paths`. Raises ApiAccessError if none of them exists, because the client would only log that."""
    found = [path for each in paths.split(os.pathsep) if each and os.path.exists(path := os.path.expanduser(each))]  # noqa: PTH110, PTH111  Path's raise
    if not found:
        raise ApiAccessError(f"there is no kubeconfig at {shown}")
    for path in found:
        mode = Path(path).stat().st_mode
        if stat.S_ISCHR(mode) or (stat.S_ISFIFO(mode) and not path.startswith("/dev/")):  # reading it might never end
            raise ApiAccessError(f"{path} is a device or pipe, not a regular file")
    return paths
