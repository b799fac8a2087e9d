"""Generates docs/reference/error-codes.md: `.venv/bin/python -m docs.error_codes`.

Statuses, codes, types and `x-should-retry` come from `gateway/errors.py` and from the rejections of the autoscaler.
The reasons of conditions come from the functions that build the conditions. Only the meanings and the remedies are
written here. A code or reason without a meaning, and a meaning without a code or reason, is a ValueError.
tests/project/test_error_codes.py compares the page with what this module would write.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from autoscaler.drivers.kubernetes import volume_failures
from autoscaler.drivers.kubernetes.adoption import annotations as workload_annotations
from autoscaler.drivers.kubernetes.adoption import status as adoption
from autoscaler.drivers.kubernetes.objects import pod_state
from autoscaler.kubernetes.resources import model_conditions
from autoscaler.state.world import History, ModelLoad
from docs.states import between
from gateway import errors
from gateway.errors import CallError

ROOT = Path(__file__).parent.parent
PAGE = Path(__file__).parent / "reference" / "error-codes.md"
_ARGUMENTS: Mapping[str, object] = {
    "message": "text", "retry_after_s": 1.0, "expected_wait_s": 1.0, "wait_s": 1.0, "limit_bytes": 1, "allow": b"POST",
    "what": "the request", "reason": "",
}  # fmt: skip
"""Arguments with which the functions of `gateway.errors` are called."""


class Meaning(NamedTuple):
    """The meaning and the remedy of a code or a reason."""

    meaning: str
    remedy: str


ERRORS = {
    (400, "invalid_request"): Meaning(
        "The request is not HTTP/1.x or not JSON; it names no Model; a member occurs twice or selects where the "
        "request goes; or the Model does not support the API endpoint.",
        "Correct what `message` and `param` name. For an unsupported endpoint, use an "
        "[engine](../how-to/engines.md) that has it.",
    ),
    (401, "invalid_api_key"): Meaning(
        "The key is missing, unknown or expired. The response is the same for all three. Or two valid keys of "
        "different Tenants were sent.",
        "Create a key with `pilotlight key new --tenant NAME`, enter its hash in the Tenant, and reload.",
    ),
    (403, "origin_not_allowed"): Meaning(
        "A web page sent the request to a loopback port without keys, or a form to any port without keys, and its "
        "origin is not in `cors.origins`.",
        "Add the origin to [`cors.origins`](../how-to/host-check.md).",
    ),
    (403, "request_rejected"): Meaning(
        "An [external check](../how-to/request-policy.md#external-checks) of the Model or the Tenant rejected the "
        "request or its answer.",
        "Change the request. `message` has the reason that the check gave.",
    ),
    (404, "model_not_found"): Meaning(
        "The Model does not exist, or this key may not call it.",
        "Compare the name with the list that `GET /v1/models` returns for the same API key; "
        "check `spec.tenants` of the Model.",
    ),
    (404, "not_found"): Meaning(
        "The path does not exist.", "Use the path in the message, or another one of the [HTTP API](http-api.md)."
    ),
    (405, "method_not_allowed"): Meaning(
        "The path does not support this method.", "Use a method that the header `Allow` lists."
    ),
    (408, "request_timeout"): Meaning(
        "The head of the request arrived too slowly, or the body stalled or arrived below the minimum rate.",
        "Check the network; change the [limit](timeouts.md) that `message` names.",
    ),
    (413, "too_large"): Meaning(
        "The body of the request exceeds the limit.",
        "Send a smaller body, or raise `limits.bodyBytesMax`. Bodies of the [Ollama API](ollama-api.md) and "
        "[translated ones](responses-api.md) of other APIs have a fixed limit of 16 MiB.",
    ),
    (415, "unsupported_media_type"): Meaning(
        "The body is neither JSON nor, where allowed, multipart; it has a `Content-Encoding` such as gzip; or a web "
        "page of another origin sent JSON without `application/json`.",
        "Send the body as plain `application/json`, or as `multipart/form-data` where the path takes files.",
    ),
    (421, "misdirected_request"): Meaning(
        "On a loopback port without keys, the name in `Host` is not local and not in `hosts`.",
        "Add the name to [`hosts`](../how-to/host-check.md).",
    ),
    (429, "queue_full"): Meaning(
        "The queue of the Model in this gateway is full.",
        "Retry after `Retry-After`; raise `spec.queue.callsMax` or `spec.replicas.max`.",
    ),
    (431, "header_too_large"): Meaning(
        "The head of the request exceeds the [limit](limits.md).", "Send fewer or smaller headers."
    ),
    (502, "upstream_error"): Meaning(
        "The engine failed before the first byte, also on the retry, or within a stream; its certificate is not "
        "trusted; or its answer is too large to be checked or translated, then with `x-should-retry: false`.",
        "Read the message, the log of the engine, and `event=engine_distrusted` in the log of the gateway.",
    ),
    (503, "model_starting"): Meaning(
        "The Model is starting, and the deadline of the request has passed or comes before the end of the start.",
        "Raise the timeout of the client, use a stream, or set `spec.replicas.min: 1`.",
    ),
    (503, "overloaded"): Meaning(
        "The request got no slot before its deadline; the engine accepts no more requests and the request cannot be "
        "retried again; the gateway has too little memory, or waits for too many external checks; or it has just "
        "started.",
        "Raise `spec.slots` or `spec.replicas.max`; for memory, the [memory of the gateway]"
        "(../how-to/gateway-memory.md) or the number of gateways.",
    ),
    (503, "check_failed"): Meaning(
        "An [external check](../how-to/request-policy.md#external-checks) did not respond in time or with a valid "
        "response, or its URL has an address that is not allowed.",
        "Read `event=check_failed` in the log of the gateway; check the server of the check, or `checks` in Settings.",
    ),
    (503, "model_start_failed"): Meaning(
        "The starts of the Model failed, or would certainly fail. `Retry-After` is the time of the next attempt.",
        "Read the condition `Ready` or `pilotlight explain model NAME`; correct the cause, then run `pilotlight wake "
        "NAME`.",
    ),
    (503, "model_faulty"): Meaning(
        "The Model caused an internal error and is quarantined.",
        "Report the line `event=model_faulty` of the log. A change of the spec or `pilotlight wake NAME` retries the "
        "Model.",
    ),
    (503, "no_capacity"): Meaning(
        "The Model fits on no device or is paused; or ordered capacity arrives after the deadline, or at an unknown "
        "time.",
        "Read [why a Model waits](messages.md#why-a-model-waits).",
    ),
    (503, "shutting_down"): Meaning(
        "The gateway is stopping, and the request was still queued.", "Retry; another gateway serves the request."
    ),
    (504, "upstream_timeout"): Meaning(
        "The engine sent no first byte, no further byte or no complete response in time.",
        "Read the log of the engine; raise `spec.firstByteSecondsMax`, `spec.stallSecondsMax` or "
        "`spec.responseSecondsMax`.",
    ),
}
"""(status, code) of each error of the inference port -> its meaning."""
_VARYING = {"check_failed", "upstream_error"}
"""Codes of errors that a retry cures only in some cases."""

READY = {
    "CannotStart": Meaning(
        "A start would certainly fail: a program, file, image or key is missing or wrong.",
        "Correct what the message names. Pilotlight then starts the Model at the next request.",
    ),
    "CrashLoop": Meaning(
        "The engine or an init container exits again and again.",
        "Read the log of the pod; correct `spec.args`, `spec.command` or the weights.",
    ),
    "Draining": Meaning("The last replica finishes its requests and then stops.", "None. A request starts the Model."),
    "Idle": Meaning("The Model is scaled to zero. A request starts it.", "None."),
    "ImagePullBackOff": Meaning(
        "The node cannot pull the image of the engine, or its name is invalid.",
        "Check `spec.image`, the pull secret (`spec.pod.imagePullSecrets`), and the registry.",
    ),
    "NoDeviceFits": Meaning(
        "No device could hold the Model, even an empty one.",
        "Compare `pilotlight explain fit NAME` with the devices; [lower its memory](../how-to/gpu-memory.md) or add "
        "devices.",
    ),
    "NotInForce": Meaning(
        "The autoscaler has not processed the object yet.",
        "Wait a second. If it lasts, check that an autoscaler leads (`pilotlight_leader`).",
    ),
    "OOMKilled": Meaning("The engine was killed for lack of host memory.", "Raise `spec.resources.limits.memory`."),
    "Paused": Meaning("`spec.paused` is true.", "Set `spec.paused` to false."),
    "Serving": Meaning("At least one replica serves requests.", "None."),
    "StartFailed": Meaning("The last start failed for another reason.", "Correct the cause that the message names."),
    "Starting": Meaning("A replica is starting, or the next plan decides on a start.", "Wait for the start."),
    "Unready": Meaning(
        "The engine runs and fails its readiness probes.",
        "Read the log of the engine. It may hang, or `spec.readinessPath` may be wrong.",
    ),
    "Unschedulable": Meaning(
        "The scheduler of the cluster keeps the pod pending. This is not a failure.",
        "Read the message of the scheduler, for example about CPU, taints or quota.",
    ),
    "WaitingForRoom": Meaning(
        "A device could hold the Model, but none has room now.",
        "Read [why a Model waits](messages.md#why-a-model-waits).",
    ),
    "Invalid": Meaning(
        "The spec violates a rule that the API server cannot check. The last valid version stays in force.",
        "Correct the key that the message names.",
    ),
    "NameTaken": Meaning("An older Model has the name.", "Rename the Model, or call it `NAMESPACE/NAME`."),
    "Faulty": Meaning(
        "The Model is quarantined after an internal error.",
        "Report the line `event=model_faulty` of the log. A change of the spec or `pilotlight wake NAME` retries the "
        "Model.",
    ),
}
"""Reason of the condition Ready -> its meaning. Starting and Degraded use the same reasons."""
FROM_KUBERNETES = {
    "CreateContainerConfigError": Meaning(
        "The kubelet cannot configure the container, for example because a Secret or a ConfigMap is missing.",
        "Create the object that the message names, or correct `spec.env`.",
    ),
    "CreateContainerError": Meaning(
        "The container runtime cannot create the container.", "Correct `spec.command` or `spec.pod`; see the message."
    ),
    "FailedAttachVolume": Meaning(
        "A volume cannot be attached to the node.", "Read the message; check the volume and its storage driver."
    ),
    "FailedMapVolume": Meaning(
        "A block volume cannot be mapped on the node.", "Read the message; check the volume and its storage driver."
    ),
    "FailedMount": Meaning(
        "A volume of the pod cannot be mounted, for example because a Secret is missing.",
        "Create the object that the message names.",
    ),
    "RunContainerError": Meaning(
        "The container runtime cannot start the container.",
        "Correct `spec.command` and `spec.pod.runtimeClassName`; see the message.",
    ),
}
"""Reason that a kubelet reports and that is passed on unchanged -> its meaning."""
TYPES = {
    "Ready": "Requests are served: by a ready replica, or by one that a request starts.",
    "Placed": "A replica has devices, or the scheduler has placed its pod.",
    "WeightsReady": "Always `Unknown`: the engine fetches its weights itself.",
    "Starting": "A replica is starting. Its reason and message are those of the start.",
    "Degraded": "The last start failed, or a replica is unready or cannot start. The Model may still serve requests.",
    "Adopted": "Always `False`: [adopted workloads](adoption.md) have no Model object.",
    "Faulty": "The Model is quarantined after an [internal error](../explanation/failures.md#internal-errors).",
    model_conditions.ELSEWHERE: "Another installation serves the Model, and writes the rest of the status. See "
    "[several installations](../how-to/several-installations.md).",
}
"""Type of a condition of a Model -> what `True` means."""
OTHER = {
    ("Placed", "Placed"): "The message names the devices.",
    ("Placed", "Idle"): "No replica is needed.",
    ("Placed", "NoDeviceFits"): "As for `Ready`.",
    ("Placed", "WaitingForRoom"): "As for `Ready`.",
    ("Placed", "Unschedulable"): "As for `Ready`.",
    ("WeightsReady", "EngineLoads"): "The engine fetches its weights itself.",
    ("Starting", "NothingStarts"): "No replica is starting.",
    ("Degraded", "AsExpected"): "No start failed, and every replica answers its probes.",
    ("Adopted", "Managed"): "Pilotlight creates the pods of the Model.",
    ("Faulty", "NoFault"): "The Model caused no internal error.",
    ("Faulty", model_conditions.ERROR): "The message names the exception.",
    ("Placed, WeightsReady, Starting, Degraded", "Quarantined"): "The Model is quarantined, see `Faulty`.",
    (model_conditions.ELSEWHERE, "OtherInstallation"): "The message names the installation. To move the Model, set "
    "`spec.installation`.",
}
"""(type, reason) of the other conditions of a Model -> its meaning."""
ADOPTED = {
    ("True", "Scaled"): Meaning("The scale follows the requests.", "None."),
    ("True", "ScaledByHand"): Meaning(
        "A scale that a person or another client set by hand is in force. The message names the client and the "
        "end (RFC 3339).",
        "Wait for the end. Settings `adoption.holdSeconds` is the duration of a manual scale.",
    ),
    ("True", "ScaledByAnother"): Meaning(
        "Another autoscaler, named in the message, scales the workload, too.",
        "Set `minReplicaCount` of a ScaledObject to 1, or remove the other autoscaler; see [other clients]"
        "(../how-to/adopt-workloads.md#other-clients-that-scale-the-workload).",
    ),
    ("True", "NameTaken"): Meaning(
        "An older Model has one of its names. The message has the name that it got instead.",
        "Use that name, or another name in `pilotlight.dev/models`.",
    ),
    ("False", "NameTaken"): Meaning(
        "Other Models have all of its names, so it is not served.", "Use another name in `pilotlight.dev/models`."
    ),
    ("False", "WrongAnnotation"): Meaning(
        "The message names the annotation, what was expected, and whether the last valid annotations are in force.",
        "Correct the annotation, see [annotations](adoption.md#annotations).",
    ),
}
"""(status, reason) of the condition of an adopted workload -> its meaning."""


def published_codes() -> dict[str, set[bool]]:
    """The codes of rejections by an autoscaler or the dispatcher of a gateway, and whether a retry can help."""
    codes: dict[str, set[bool]] = {}
    for path in (ROOT / "autoscaler" / "routing" / "routes.py", ROOT / "gateway" / "dispatch" / "model_dispatcher.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                values = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
                values += node.args[:1] if name == "errors.service_unavailable" else []
                helps = not any(keyword.arg == "should_retry" for keyword in node.keywords)
                for one in values if name in {"Refusal", "errors.service_unavailable"} else ():
                    if isinstance(one, ast.Constant):
                        codes.setdefault(str(one.value), set()).add(helps)
    return codes


def raised_errors() -> list[CallError]:
    """One instance of each error of the inference port, by status and code."""
    found: dict[tuple[int, str], CallError] = {}
    for _, function in inspect.getmembers(errors, inspect.isfunction):
        signature = inspect.signature(function)
        if signature.return_annotation != "CallError":
            continue
        required = [one.name for one in signature.parameters.values() if one.default is inspect.Parameter.empty]
        for code in sorted(published_codes()) if "code" in required else [""]:
            values = {**_ARGUMENTS, "code": code}
            error: CallError = function(**{name: values[name] for name in required})
            error.should_retry &= True in published_codes().get(code, {True})
            found[error.status, error.code] = error
    return [found[key] for key in sorted(found)]


def reasons(*functions: Callable[..., object], nested: bool = True) -> set[str]:
    """The reasons in conditions that these functions of `model_conditions` build; if `nested`, also those they call."""
    found: set[str] = set()
    seen: set[str] = set()
    pending = [one.__name__ for one in functions]
    while pending:
        name = pending.pop()
        function = getattr(model_conditions, name, None)
        if name in seen or not inspect.isfunction(function) or function.__module__ != model_conditions.__name__:
            continue
        seen.add(name)
        for node in ast.walk(ast.parse(inspect.getsource(function))):
            values: Iterable[ast.expr | None] = ()
            if isinstance(node, ast.Call):
                pending += [ast.unparse(node.func)] if nested else []
                at = {"_no": 0, "ConditionValue": 2}.get(ast.unparse(node.func))
                values = () if at is None else node.args[at : at + 1]
            elif isinstance(node, ast.Return | ast.Assign):
                value = node.value
                values = (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,)
            found |= {text for one in values if (text := _text(one)).isalpha() and text[:1].isupper()}
    return found | (set(model_conditions.WORDS.values()) if "_head" in seen else set())


def _text(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    value = getattr(model_conditions, node.id, "") if isinstance(node, ast.Name) else ""
    return value if isinstance(value, str) else ""


def ready_reasons() -> set[str]:
    """The reasons of the condition Ready that Pilotlight chooses itself."""
    quarantined = reasons(model_conditions.build_conditions, nested=False) - {"Quarantined", model_conditions.ERROR}
    return reasons(*model_conditions.RULES) | quarantined | {model_conditions.INVALID, model_conditions.NAME_TAKEN}


def kubernetes_reasons() -> set[str]:
    """The reasons of a kubelet that are passed on unchanged."""
    return {*pod_state._INIT_PATIENCE_S, *volume_failures.FAILURES} - model_conditions.WORDS.keys() - ready_reasons()  # noqa: SLF001  private to the product; this page lists what they return


def other_reasons() -> set[tuple[str, str]]:
    """(type, reason) of the conditions apart from Ready; without reasons that Starting and Degraded share with it."""
    builders = {
        "Placed": model_conditions._placed, "WeightsReady": model_conditions._weights,  # noqa: SLF001  private to the product; this page lists what they return
        "Starting": model_conditions._starting, "Degraded": model_conditions._degraded,  # noqa: SLF001  private to the product; this page lists what they return
    }  # fmt: skip
    shared = ready_reasons()
    found = {
        (type, reason)
        for type, builder in builders.items()
        for reason in reasons(builder)
        if type == "Placed" or reason not in shared
    }
    found -= {("Placed", reason) for reason in {*model_conditions.WORDS.values()} - {model_conditions.UNSCHEDULABLE}}
    found |= {(one.type, one.reason) for one in (model_conditions.ADOPTED, model_conditions.SOUND)}
    return found | {
        ("Faulty", model_conditions.ERROR), (", ".join(builders), "Quarantined"),
        (model_conditions.ELSEWHERE, "OtherInstallation"),
    }  # fmt: skip


def adopted_reasons() -> set[tuple[str, str]]:
    """(status, reason) of the condition of an adopted workload."""
    good = (adoption.SCALED, workload_annotations.BY_HAND, workload_annotations.BY_ANOTHER, model_conditions.NAME_TAKEN)
    return {("True", one) for one in good} | {
        ("False", model_conditions.NAME_TAKEN),
        ("False", workload_annotations.WRONG),
    }


def error_rows() -> str:
    """The table of the errors."""
    raised, advice = raised_errors(), published_codes()
    _compare("error", {(one.status, one.code) for one in raised}, ERRORS)
    rows = []
    for error in raised:
        headers = dict(errors.render_error_headers(error))
        retry = f"`{headers[b'x-should-retry'].decode()}`" if b"x-should-retry" in headers else "not sent"
        if len(advice.get(error.code, ())) > 1 or error.code in _VARYING:
            retry += ", or `false` if no wait can help"
        meaning, remedy = ERRORS[error.status, error.code]
        rows.append((str(error.status), f"`{error.code}`", f"`{error.type}`", meaning, retry, remedy))
    return _table(("status", "code", "type", "meaning", "`x-should-retry`", "remedy"), rows)


def ready_rows() -> str:
    """The table of the reasons of Ready."""
    _compare("reason of Ready", ready_reasons(), READY)
    _compare("reason of Kubernetes", kubernetes_reasons(), FROM_KUBERNETES)
    serves = {"Serving", "Idle"}
    own = [
        (f"`{one}`", f"`{one in serves}`", *READY[one])
        for one in sorted(READY, key=lambda one: (one not in serves, one))
    ]
    return _table(("reason", "status", "meaning", "remedy"), [
        *own, *((f"`{one}`", "`False`", *FROM_KUBERNETES[one]) for one in sorted(FROM_KUBERNETES)),
    ])  # fmt: skip


def type_rows() -> str:
    """The tables of the types, and of the reasons of the other types."""
    _compare("reason", other_reasons(), OTHER)
    _compare(
        "type", {one.type for one in model_conditions.build_conditions(_CASE)} | {model_conditions.ELSEWHERE}, TYPES
    )
    types = _table(("type", "`True` means"), [(f"`{type}`", meaning) for type, meaning in TYPES.items()])
    cells = [
        (", ".join(f"`{one}`" for one in type.split(", ")), f"`{reason}`", text)
        for (type, reason), text in OTHER.items()
    ]
    return types + "\n" + _table(("type", "reason", "meaning"), cells)


def adopted_rows() -> str:
    """The table of the reasons of adopted workloads."""
    _compare("reason of adopted workloads", adopted_reasons(), ADOPTED)
    cells = [(f"`{status}`", f"`{reason}`", *text) for (status, reason), text in ADOPTED.items()]
    return _table(("status", "reason", "meaning", "remedy"), cells)


_CASE = model_conditions.StatusInput(1, None, (), ModelLoad(), History())


def _compare(kind: str, known: Iterable[object], described: Iterable[object]) -> None:
    """Raises ValueError for a code without a meaning, and for a meaning without a code."""
    if differing := set(known) ^ set(described):
        raise ValueError(f"docs/error_codes.py: {kind} without a meaning, or meaning without it: {differing}")


def _table(head: tuple[str, ...], cells: Iterable[tuple[str, ...]]) -> str:
    rows = [head, ("---",) * len(head), *cells]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def page(text: str) -> str:
    """The page with current tables."""
    blocks = {"errors": error_rows, "ready": ready_rows, "conditions": type_rows, "adopted": adopted_rows}
    for mark, build in blocks.items():
        text = between(text, mark, f"\n{build()}\n")
    return text


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
