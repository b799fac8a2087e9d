"""Where the API server is and how one is let in: kubeconfig, or the service account of the pod that we run in.

Owns the reading of credentials, by the official client (`kubernetes.aio`): certificates, tokens that are renewed, exec
plug-ins. Promises: a token is asked for anew for each request, so that one that was renewed on disk is used at once.
"""

from __future__ import annotations

import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kubernetes.aio import client


class AccessError(Exception):
    """No credentials, or such as cannot be read; the message says where they were looked for, or what is missing."""


class Access:
    """A server's address, whom to trust for it, and who we are there."""

    def __init__(self, configuration: client.Configuration) -> None:
        self._configuration = configuration
        self.server: str = configuration.host.rstrip("/")

    def tls(self) -> ssl.SSLContext | bool:
        """How the server is verified, and our certificate, if we have one."""
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
        """Who we are, for the next request."""
        token = await self._configuration.get_api_key_with_prefix("BearerToken")
        return {"Authorization": token} if token else {}


async def access(kubeconfig: Path | None = None) -> Access:
    """From a file, else from the pod's service account, else from where kubectl looks. Raises AccessError."""
    try:
        from kubernetes.aio import client, config  # only here: it is an extra
        from kubernetes.aio.config import ConfigException
    except ModuleNotFoundError as error:
        raise AccessError(
            f"Kubernetes needs the extra: pip install 'pilotlight[kubernetes]' ({error.name} is missing)"
        ) from None
    load_kube_config: Callable[..., Awaitable[None]] = config.load_kube_config
    load_incluster_config: Callable[..., None] = config.load_incluster_config
    configuration = client.Configuration()
    try:
        if kubeconfig is not None:
            await load_kube_config(str(kubeconfig), client_configuration=configuration)
        else:
            try:
                load_incluster_config(client_configuration=configuration)
            except ConfigException:
                await load_kube_config(client_configuration=configuration)
    except (ConfigException, OSError) as error:
        where = kubeconfig or "the pod's service account, $KUBECONFIG or ~/.kube/config"
        raise AccessError(f"no way to a Kubernetes API server from {where}: {error}") from error
    return Access(configuration)
