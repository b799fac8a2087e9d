"""An admission webhook on 127.0.0.1 for the pods of a namespace: it rejects or changes them, is slow, or is down."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from autoscaler.kubernetes.api import Api, Object
from tests.integration.cluster.support.control_plane.components import HOST, free_ports
from tests.integration.cluster.support.control_plane.service_accounts import refused

GROUP = "/apis/admissionregistration.k8s.io/v1"
WAIT_S_MAX = 90.0
TRIAL: Object = {
    "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "trial"},
    "spec": {"containers": [{"name": "a", "image": "a"}]},
}  # fmt: skip


async def _certificate(folder: Path) -> tuple[Path, Path]:
    """Returns (key, self-signed certificate) for HOST."""
    key, certificate = folder / "webhook.key", folder / "webhook.crt"
    words = (
        "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={HOST}",
        "-addext", f"subjectAltName=IP:{HOST}", "-keyout", str(key), "-out", str(certificate),
    )  # fmt: skip
    process = await asyncio.create_subprocess_exec(*words, stderr=asyncio.subprocess.DEVNULL)
    assert await process.wait() == 0
    return key, certificate


async def _until_called(api: Api, namespace: str, called: asyncio.Event) -> None:
    """Returns when the API server calls the webhook for a pod: it reads a new configuration with a delay."""

    async def create() -> None:
        message = await refused(api.create(f"/api/v1/namespaces/{namespace}/pods?dryRun=All", TRIAL))
        if "failed calling webhook" in message:
            called.set()  # without a listener nothing else shows it

    async def wait() -> None:
        await called.wait()

    async with asyncio.timeout(WAIT_S_MAX):
        while not called.is_set():
            tasks = [asyncio.create_task(one()) for one in (create, wait)]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(0.02)


@asynccontextmanager
async def webhook(
    api: Api, namespace: str, folder: Path, *, rejects: str = "", patch: Sequence[Object] = (), delay_s: float = 0.0,
    timeout_s: int = 30, listens: bool = True,
) -> AsyncIterator[Callable[[], Awaitable[None]]]:  # fmt: skip
    """Registers the webhook; yields when it is in effect. It admits each pod after `delay_s`, or rejects it with the
    message `rejects`. It applies the JSON Patch `patch` to each. If it needs more than `timeout_s` it is ignored.
    Without `listens` its connections are refused until the yielded function is called.
    """
    key, certificate = await _certificate(folder)
    (port,) = free_ports(1)
    called = asyncio.Event()

    async def review(request: web.Request) -> web.Response:
        called.set()
        asked = (await request.json())["request"]
        await asyncio.sleep(delay_s)
        verdict: Object = {"allowed": True}
        if rejects:
            verdict = {"allowed": False, "status": {"code": 403, "message": rejects}}
        if patch:
            verdict |= {"patchType": "JSONPatch", "patch": base64.b64encode(json.dumps(list(patch)).encode()).decode()}
        answer = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
                  "response": {"uid": asked["uid"], **verdict}}  # fmt: skip
        return web.Response(text=json.dumps(answer), content_type="application/json")

    app = web.Application()
    app.router.add_post("/", review)
    runner = web.AppRunner(app)
    await runner.setup()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)

    async def listen() -> None:
        await web.TCPSite(runner, HOST, port, ssl_context=context).start()

    if listens:
        await listen()
    name = f"webhook-{namespace}"
    hook: Object = {
        "name": "pods.test.example", "sideEffects": "None", "admissionReviewVersions": ["v1"],
        "timeoutSeconds": timeout_s, "failurePolicy": "Ignore" if delay_s > timeout_s else "Fail",
        "clientConfig": {
            "url": f"https://{HOST}:{port}/", "caBundle": base64.b64encode(certificate.read_bytes()).decode()
        },
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
    }  # fmt: skip
    kind = "MutatingWebhookConfiguration" if patch else "ValidatingWebhookConfiguration"
    configurations = f"{GROUP}/{kind.lower()}s"
    await api.create(configurations, {
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": kind,
        "metadata": {"name": name}, "webhooks": [hook],
    })  # fmt: skip
    try:
        await _until_called(api, namespace, called)
        yield listen
    finally:
        await api.delete(f"{configurations}/{name}")
        await runner.cleanup()
