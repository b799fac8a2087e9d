"""Validates one document beyond its types: keys that are not supported yet, names, ranges and rules between keys. Pure.

- Unsupported keys (KEYS) are rejected instead of ignored, because users expect a key that they set to take effect. A
key is removed from the list by the change that implements it.

- Namespace access: the pods of all Models are created in one namespace, so the name of a Secret, ConfigMap, claim or
service account refers to that namespace. Users who may create Models in other namespaces have no right to these
objects, so keys that use them are rejected (`check_namespace_access`), except volumes that use nothing of a namespace.

- Rules between keys raise WrongKeyError with the key to change. `autoscaler.documents.parse` has the rules between
documents, such as unique names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

import msgspec

from autoscaler.slicing.slicers import is_device_annotation, is_device_resource
from autoscaler.slicing.vendors import TEMPLATES
from autoscaler.spec import cron
from autoscaler.spec.artifact_name import STORED
from autoscaler.spec.capacity import check_providers
from autoscaler.spec.decode import Path, WrongKeyError, suggest_nearest
from autoscaler.spec.document_names import ALIAS, ALIAS_WANTED, NAME, NAME_CHARS_MAX, check_alias, check_name
from autoscaler.spec.engine_definition import PLACEHOLDER, PLACEHOLDERS, RESERVED, reserved_flags
from autoscaler.spec.engines import ENGINES
from autoscaler.spec.installation_ownership import TITLE, TITLE_WANTED
from autoscaler.spec.model import Model, ModelSpec, ReplicaRange, ReplicaWindow
from autoscaler.spec.pod import EnvSource, check_labels, check_object_name, check_pod, check_resources, check_source
from autoscaler.spec.policy import check_policy, check_url, is_address, is_network
from autoscaler.spec.settings import NodeKind, Settings, Signatures, Tls
from autoscaler.spec.tenant import TenantSpec
from autoscaler.text import unix_seconds

MESSAGE = "is not supported yet in this version"
TRITON_ONLY = "only engine `triton` supports it; remove it"

LATER_ENGINES = frozenset({"external"})
SCHEMES = frozenset({"pvc", *STORED})

_MODEL = (*("fallbacks", "url", "upstreamModel", "keyFrom", "sleep", "owner"),)
_TENANT = (
    *("parent", "namespaces", "keysFrom", "jwt", "guarantee", "limit", "lending", "reclaimSeconds", "rate", "budget"),
)
_SETTINGS = ("history",)
KEYS: dict[str, tuple[str, ...]] = {
    "Model": tuple(f"spec.{key}" for key in _MODEL),
    "Tenant": tuple(f"spec.{key}" for key in _TENANT),
    "Settings": _SETTINGS,
}
"""Kind -> unsupported key paths. `*` matches any key and any item of a list."""


def find_unsupported_key(kind: str, document: object) -> Path | None:
    """Return the path of the first key, or of the engine, that is not supported yet."""
    for key in KEYS[kind]:
        for found in _find(document, key.split("."), ()):
            return found
    return ("spec", "engine") if kind == "Model" and _engine(document) in LATER_ENGINES else None


def _find(value: object, parts: list[str], at: Path) -> Iterator[Path]:
    if not parts:
        yield at
    elif isinstance(value, list) and parts[0] == "*":
        for position, item in enumerate(value):
            yield from _find(item, parts[1:], (*at, position))
    elif isinstance(value, dict):
        for key in value if parts[0] == "*" else [parts[0]]:
            if key in value:
                yield from _find(value[key], parts[1:], (*at, key))


def _engine(document: object) -> str:
    spec = document.get("spec") if isinstance(document, dict) else None
    engine = spec.get("engine") if isinstance(spec, dict) else None
    return engine if isinstance(engine, str) else ""


OF_NO_NAMESPACE = frozenset({"emptyDir", "downwardAPI", "image"})
"""Volume types that use no object of the namespace. `ephemeral` is none of them: its claim may copy another one."""


def check_namespace_access(model: Model, namespace: str) -> None:
    """Check that a Model of another namespace uses no object of the pods' `namespace`. Raises WrongKeyError."""
    if model.namespace == namespace:
        return
    for path in _reaching(model.spec):
        fix = f"create the Model in namespace {namespace}, or remove this key"
        raise WrongKeyError(("spec", *path), f"uses the pods' namespace, which is not the Model's: {fix}")


def _reaching(spec: ModelSpec) -> Iterator[Path]:
    """Yield the paths below spec that use objects of the pods' namespace."""
    for name, source in spec.env.items():
        if isinstance(source, EnvSource):
            of = source.value_from
            if of.secret_key_ref is not None:
                yield "env", name, "valueFrom", "secretKeyRef"
            if of.config_map_key_ref is not None:
                yield "env", name, "valueFrom", "configMapKeyRef"
    if spec.pull_secret is not None:
        yield ("pullSecret",)
    if (spec.artifact or "").startswith("pvc://"):
        yield ("artifact",)
    for position, volume in enumerate(spec.pod.volumes):
        for kind in sorted(volume.keys() - {"name"} - OF_NO_NAMESPACE):
            yield "pod", "volumes", position, kind
    if spec.pod.image_pull_secrets:
        yield "pod", "imagePullSecrets"
    if spec.pod.service_account_name is not None:
        yield "pod", "serviceAccountName"


__all__ = ["ALIAS", "ALIAS_WANTED", "NAME", "NAME_CHARS_MAX", "check_alias", "check_name"]  # re-exported names

AMOUNT_RESERVED = "is set by Pilotlight: use spec.gpu"
CHOICE_RESERVED = "is set by Pilotlight, which selects the devices: remove it"
ADAPTERS_MAX = 64
"""The maximum number of adapters per Model."""
ADAPTED_NAMES_MAX = 1024
"""The maximum number of names with an adapter per Model: each gateway keeps every one of them in memory."""
ADAPTED_NAMES_WANTED = (
    f"expected at most {ADAPTED_NAMES_MAX} names model:adapter, counted as (aliases + 1) x adapters: remove aliases or "
    "adapters"
)
OPERATORS_OWN = {"default-mig-parted-config", "custom-mig-parted-config"}
"""ConfigMaps that the GPU operator writes."""
REPLICATED = {"timeslice", "mps"}
"""Sharing modes for which Settings set the number of parts of a device."""
SET_BY_DRIVER = {
    "CUDA_VISIBLE_DEVICES": "to the allocated devices",
    "PILOTLIGHT_REPLICA": "to identify the engine's processes",
    "POD_IP": "to the address that an engine in a pod listens on",
}
"""Variables that drivers always set in the environment of an engine, and the reason."""
DEVICES_CHOSEN = "selects devices or changes their limits, which only Pilotlight may do: remove it"
CHOICES_END = ("_DEVICE_ORDINAL", "_DEVICE_SELECTOR", "_VISIBLE_CORES", "_VISIBLE_DEVICES")
CHOICES_BEGIN = (
    "ASCEND_VNPU_SPECS", "CAMBRICON_SPLIT_", "CUDA_DEVICE_MEMORY_", "CUDA_DEVICE_SM_LIMIT", "CUDA_DISABLE_CONTROL",
    "CUDA_MPS_", "CUDA_OVERSUBSCRIBE", "CUDA_TASK_PRIORITY", "GPU_CORE_UTILIZATION_POLICY", "NVIDIA_IMEX_CHANNELS",
    "NVIDIA_MIG_", "PILOTLIGHT_", "SYCL_DEVICE_", "ZE_AFFINITY_MASK",
)  # fmt: skip
"""Variables by which container runtimes and drivers select devices, and by which HAMi and MPS limit a container to its
part: suffixes (`CHOICES_END`) and prefixes (this).
"""
HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?(\.[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?)*")
NEXT_FLAG = re.compile(r"-[A-Za-z-]")
"""The beginning of an argument that is a flag and not the value of the flag before it."""
ADAPTER = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
ADAPTER_PATH = re.compile(r"file:///[^\x00-\x1f,:=\"]+")
"""Characters with a special meaning in some engine's list of adapters are excluded."""
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://([a-z0-9._~%-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
"""An origin in the form in which browsers send it in `Origin` (RFC 6454, 6.2), in lower case."""
ORIGIN_WANTED = 'expected an origin such as https://llm.example, in lower case and without a path, or "*"'
BEGIN = "-----BEGIN PUBLIC KEY-----"
ARTIFACT_CHARS_MAX = 1024
"""The maximum length of an artifact. Messages between autoscalers and agents have artifacts of many Models."""
NAMES_BYTES_MAX = 16 << 10
"""The maximum size of a Model's aliases and tenants together, as JSON. The catalogue that each gateway receives has
those of all Models in one message, whose size is limited.
"""
FILE_WANTED = "expected an absolute path such as file:///models/a.gguf, or another source such as oci://"
CLAIM = re.compile(
    r"pvc://[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?)*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*/?"
)
"""A claim, and a path in it whose parts do not begin with a dot."""
MIRROR = re.compile(r"[A-Za-z0-9.:\[\]-]+(/[a-z0-9._-]+)*")

CLAIM_WANTED = "expected pvc://claim/path, without .. and without parts that begin with a dot"
PRODUCT_WANTED = "expected a product name or a glob such as *h100*; omit models to accept any device"


def check_own_names(name: str, spec: ModelSpec) -> None:
    """Check the number of names of one Model, and that they differ: its own name, its aliases and the names of its
    adapters.
    """
    if (len(spec.aliases) + 1) * len(spec.adapters) > ADAPTED_NAMES_MAX:
        raise WrongKeyError(("spec", "adapters"), ADAPTED_NAMES_WANTED)
    seen = {name: "the Model's own name"}
    for position, alias in enumerate(spec.aliases):
        taken = seen.setdefault(alias, f"spec.aliases[{position}]")
        if taken != f"spec.aliases[{position}]":
            raise WrongKeyError(("spec", "aliases", position), f"`{alias}` is already {taken}")
    for adapter in spec.adapters:
        for stem in (name, *spec.aliases):
            called = f"{stem}:{adapter.name}"
            check_alias(called, ("spec", "adapters"))
            if called in seen:
                raise WrongKeyError(("spec", "adapters"), f"`{called}` is already {seen[called]}")


def check_served_name(name: str, spec: ModelSpec) -> None:
    """Check the name under which the engine serves the Model."""
    if ":" in name and not ENGINES[spec.engine].colon_in_name:
        at = ("metadata", "name")
        raise WrongKeyError(
            at, f"engine {spec.engine} does not support a name with `:`; use it in spec.aliases instead"
        )


def _is_host(name: str) -> bool:
    return len(name) <= NAME_CHARS_MAX and HOST.fullmatch(name) is not None


def _check_replicas(of: ReplicaRange) -> None:
    at = ("spec", "replicas")
    if of.min > of.max:
        raise WrongKeyError((*at, "min"), f"expected at most replicas.max, which is {of.max}")
    for position, window in enumerate(of.schedule):
        _check_window(window, of.max, (*at, "schedule", position))


def _check_window(window: ReplicaWindow, most: int, at: Path) -> None:
    if window.min > most:
        raise WrongKeyError((*at, "min"), f"expected at most replicas.max, which is {most}")
    for key, check in (("cron", cron.parse_cron), ("timeZone", cron.zone_of)):
        try:
            check(window.cron if key == "cron" else window.time_zone)
        except ValueError as error:
            raise WrongKeyError((*at, key), str(error)) from None


def check_size_of_names(spec: ModelSpec) -> None:
    """Check that the aliases and Tenants of a Model are not too many. Raises WrongKeyError."""
    sizes = {key: len(msgspec.json.encode(getattr(spec, key))) for key in ("aliases", "tenants")}
    if sum(sizes.values()) > NAMES_BYTES_MAX:
        limit = f"at most {NAMES_BYTES_MAX >> 10} KiB for all aliases and tenants together"
        raise WrongKeyError(("spec", max(sizes, key=sizes.__getitem__)), f"expected {limit}")


def check_tenant_names(spec: ModelSpec) -> None:
    """Check the length of the names in `spec.tenants`. Raises WrongKeyError."""
    for position, tenant in enumerate(spec.tenants or ()):
        if len(tenant) > NAME_CHARS_MAX:
            raise WrongKeyError(("spec", "tenants", position), f"expected at most {NAME_CHARS_MAX} characters")


def check_model(spec: ModelSpec) -> None:
    """Check the spec of a Model. Raises WrongKeyError."""
    _check_replicas(spec.replicas)
    for position, alias in enumerate(spec.aliases):
        check_alias(alias, ("spec", "aliases", position))
    check_tenant_names(spec)
    check_size_of_names(spec)
    if spec.readiness_path is not None and not re.fullmatch(r"/[!-~]*", spec.readiness_path):
        raise WrongKeyError(("spec", "readinessPath"), "expected a path such as /health")
    for key, value in spec.env.items():
        if isinstance(value, EnvSource):
            check_source(value, ("spec", "env", key))
        if not key or "=" in key or "\0" in key + (value if isinstance(value, str) else ""):
            raise WrongKeyError(("spec", "env", key), "expected a variable name without `=`, and a value without NUL")
        if key in SET_BY_DRIVER:
            raise WrongKeyError(("spec", "env", key), f"is set by Pilotlight {SET_BY_DRIVER[key]}: remove it")
        if key.endswith(CHOICES_END) or key.startswith(CHOICES_BEGIN):
            raise WrongKeyError(("spec", "env", key), DEVICES_CHOSEN)
    if spec.tls is not None and spec.tls.server_name is not None and not _is_host(spec.tls.server_name):
        raise WrongKeyError(("spec", "tls", "serverName"), "expected a host name such as engine.example")
    if spec.triton is not None and spec.engine != "triton":
        raise WrongKeyError(("spec", "triton"), TRITON_ONLY)
    for position, products in enumerate(spec.gpu.models):
        if not products.strip():
            raise WrongKeyError(("spec", "gpu", "models", position), PRODUCT_WANTED)
    check_resources(spec.resources, ("spec", "resources"))
    check_pod(spec.pod, ("spec", "pod"))
    check_policy(spec.policy, ("spec", "policy"))
    _check_devices(spec)
    for key, label in (("spread", spec.spread), ("near", spec.near)):
        if label is not None:
            check_labels({label: ""}, ("spec", key))
    if spec.gpu.link != "any" and spec.gpu.count <= 1:
        raise WrongKeyError(("spec", "gpu", "link"), "applies to several devices: set gpu.count above 1, or remove it")
    if spec.installation is not None and not TITLE.fullmatch(spec.installation):
        raise WrongKeyError(("spec", "installation"), TITLE_WANTED)
    if spec.pull_secret is not None:
        check_object_name(spec.pull_secret, ("spec", "pullSecret"))
    for key, words in (("args", spec.args), ("command", spec.command)):
        for position, word in enumerate(words):
            _check_no_nul(word, ("spec", key, position))
    _check_artifact(spec)
    _check_adapters(spec)
    _check_command(spec)
    if spec.gpu.elastic_percent is not None:
        _check_sized(spec, "elastic", "smaller")
    if spec.gpu.growth_percent is not None:
        _check_sized(spec, "growth", "larger")
    if ENGINES[spec.engine].pages and spec.gpu.memory_bytes == 0:
        _check_limited(spec)
        _check_unsized(spec, "memory: auto")
    _check_reserved(spec)
    _check_scaling(spec)


def _check_scaling(spec: ModelSpec) -> None:
    """Check that the engine reports each signal that it must report."""
    metrics = ENGINES[spec.engine].behavior.metrics
    for signal in spec.scaling.targets():
        at: Path = ("spec", "scaling", signal)
        if signal == "prometheus":
            continue
        if metrics is None or not metrics.is_readable(signal):
            raise WrongKeyError(
                at, f"engine {spec.engine} reports no such metric: remove it, or use spec.scaling.prometheus"
            )
        if metrics.flag and metrics.flag not in spec.args:
            raise WrongKeyError(at, f"engine {spec.engine} has no metrics by default: add {metrics.flag} to spec.args")


def _check_no_nul(text: str, at: Path) -> None:
    if "\0" in text:
        raise WrongKeyError(at, "expected text without NUL, which no program can read")


def _check_artifact(spec: ModelSpec) -> None:
    at, takes = ("spec", "artifact"), ENGINES[spec.engine].artifacts
    if spec.artifact is None:
        if takes != "optional-file":
            hub = " or hf://org/name@revision" if takes == "file-or-hf" else ""
            raise WrongKeyError(at, f"missing; engine {spec.engine} needs one such as file:///path{hub}")
        return
    _check_artifact_length(spec.artifact, at)
    _check_no_nul(spec.artifact, at)
    scheme = spec.artifact.partition("://")[0]
    if scheme == "pvc" or (scheme in STORED and not ENGINES[spec.engine].file_only):
        pattern, wanted = STORED.get(scheme, (CLAIM, CLAIM_WANTED))
        if not pattern.fullmatch(spec.artifact):
            raise WrongKeyError(at, wanted)
    elif scheme in SCHEMES:
        raise WrongKeyError(at, f"{scheme}:// {MESSAGE} for engine {spec.engine}")
    elif not spec.artifact.startswith("file:///") or len(spec.artifact) == len("file:///"):
        raise WrongKeyError(at, FILE_WANTED)


def _check_artifact_length(artifact: str, at: Path) -> None:
    if len(artifact) > ARTIFACT_CHARS_MAX:
        raise WrongKeyError(at, f"expected at most {ARTIFACT_CHARS_MAX} characters")


def _check_adapters(spec: ModelSpec) -> None:
    support, seen = ENGINES[spec.engine].adapters, set[str]()
    if not spec.adapters:
        return
    if support is None:
        raise WrongKeyError(
            ("spec", "adapters"),
            f"engine {spec.engine} does not support adapters: use a model that includes the adapter",
        )
    if len(spec.adapters) > ADAPTERS_MAX:
        raise WrongKeyError(("spec", "adapters"), f"expected at most {ADAPTERS_MAX}")
    for position, adapter in enumerate(spec.adapters):
        at: Path = ("spec", "adapters", position)
        if not ADAPTER.fullmatch(adapter.name):
            wanted = "1 to 63 letters, digits or ._- that begin and end with a letter or digit"
            raise WrongKeyError((*at, "name"), f"expected {wanted}")
        if adapter.name in seen:
            raise WrongKeyError((*at, "name"), f"`{adapter.name}` occurs twice")
        seen.add(adapter.name)
        _check_artifact_length(adapter.artifact, (*at, "artifact"))
        scheme = adapter.artifact.partition("://")[0]
        if scheme in STORED and spec.engine != "command":  # the command itself defines where its adapters are
            pattern, wanted = STORED[scheme]
            if not pattern.fullmatch(adapter.artifact):
                raise WrongKeyError((*at, "artifact"), wanted)
            continue
        if scheme in SCHEMES:
            of = " of engine command" if scheme in STORED else ""
            raise WrongKeyError((*at, "artifact"), f"{scheme}:// {MESSAGE} for adapters{of}")
        if not ADAPTER_PATH.fullmatch(adapter.artifact):
            wanted = (
                "expected an absolute path such as file:///models/support.gguf; a comma, a colon, an equals sign or a "
                "double quote is not allowed in the path"
            )
            raise WrongKeyError((*at, "artifact"), wanted)
    for position, arg in enumerate(spec.args):
        if arg.partition("=")[0].replace("_", "-") in support.excludes:
            raise WrongKeyError(
                ("spec", "args", position), "not allowed with spec.adapters: it would mix up the adapters"
            )


def _check_command(spec: ModelSpec) -> None:
    at: Path = ("spec", "command")
    if spec.engine != "command":
        if spec.command:
            raise WrongKeyError(at, f"only engine `command` supports it; use `args` for engine {spec.engine}")
        return
    used = {name for word in spec.command for name in PLACEHOLDER.findall(word)}
    if "port" not in used:
        raise WrongKeyError(at, "expected a list of words, one of which contains {port}, the port to listen on")
    for name in sorted(used - PLACEHOLDERS):
        raise WrongKeyError(at, f"unknown placeholder {{{name}}}{suggest_nearest(name, PLACEHOLDERS)}")
    if "model_path" in used and spec.artifact is None:
        raise WrongKeyError(at, "{model_path} needs spec.artifact")
    if "context_tokens" in used and spec.context_tokens is None:
        raise WrongKeyError(at, "{context_tokens} needs spec.contextTokens")


def _check_reserved(spec: ModelSpec) -> None:
    """Check that arguments and variables set nothing that Pilotlight sets itself."""
    engine, unset = ENGINES[spec.engine], set[str]()
    if spec.context_tokens is None:
        unset |= {"context_tokens", "all_context_tokens"}
    if spec.artifact is None:
        unset.add("model_path")
    flags = reserved_flags(engine)
    for position, (arg, after) in enumerate(pairwise((*spec.args, "--"))):
        flag, is_joined, _ = arg.partition("=")
        name = flags.get(flag.replace("_", "-"))
        has_value = is_joined or not NEXT_FLAG.match(after)  # `--slots` of llama-server is a switch
        if name is not None and name not in unset and has_value:
            raise WrongKeyError(("spec", "args", position), f"{flag} is set by Pilotlight: {RESERVED[name]}")
    for key in spec.env:
        word = engine.env.get(key, "")
        for name in PLACEHOLDER.findall(word if isinstance(word, str) else "".join(word)):
            if name in RESERVED and name not in unset:
                what = " to the listening address" if name in {"host", "port"} else ""
                raise WrongKeyError(("spec", "env", key), f"is set by Pilotlight{what}: {RESERVED[name]}")


def _check_sized(spec: ModelSpec, key: str, other: str) -> None:
    """Check that the engine's memory can be configured, as `elastic` and `growth` require. `key` is a key of `gpu`."""
    at: Path = ("spec", "gpu", key)
    engine = ENGINES[spec.engine]
    if spec.gpu.count != 1:
        raise WrongKeyError(at, f"only a part of one device can be {other}: remove it, or set gpu.count to 1")
    if engine.sizes_itself:
        raise WrongKeyError(at, f"the cache size of engine {spec.engine} cannot be configured: remove it")
    if engine.pages and spec.gpu.memory_bytes is None:
        raise WrongKeyError(at, f"requires gpu.memory, because engine {spec.engine} uses all memory that it is given")
    if spec.engine == "command" and not any("{memory_bytes}" in word for word in spec.command):
        raise WrongKeyError(
            at, "requires {memory_bytes} in spec.command, which passes the granted memory to the engine"
        )
    _check_unsized(spec, key)


def _check_limited(spec: ModelSpec) -> None:
    """Check that the engine can be limited to what its artifact needs, as `gpu.memory: auto` requires."""
    if ENGINES[spec.engine].sizes_itself:
        why = f"engine {spec.engine} cannot be limited to what it needs"
        raise WrongKeyError(("spec", "gpu", "memory"), f"{why}: remove it, or set a size")


def _check_unsized(spec: ModelSpec, key: str) -> None:
    """Check that arguments and variables do not set the memory, because `gpu.<key>` does."""
    engine, named = ENGINES[spec.engine], f"not allowed with gpu.{key}, which sets the memory: remove it"
    for position, arg in enumerate(spec.args):
        if arg.partition("=")[0].replace("_", "-") in engine.sized_by:
            raise WrongKeyError(("spec", "args", position), named)
    for variable in spec.env.keys() & engine.sized_by:
        raise WrongKeyError(("spec", "env", variable), named)


def check_tenant(spec: TenantSpec) -> None:
    """Check the spec of a Tenant. Raises WrongKeyError."""
    check_policy(spec.policy, ("spec", "policy"))
    for position, key in enumerate(spec.keys):
        for name, value in (("createdAt", key.created_at), ("expiresAt", key.expires_at)):
            try:
                unix_seconds(value or "1970-01-01T00:00:00Z")
            except ValueError:
                at = ("spec", "keys", position, name)
                raise WrongKeyError(at, "expected a time such as 2027-01-31T12:00:00Z") from None


def _check_tls(tls: Tls) -> None:
    files = {"certFile": tls.cert_file, "keyFile": tls.key_file, "caFile": tls.ca_file}
    for name, path in files.items():
        if path is not None and not path.startswith("/"):
            raise WrongKeyError(("tls", name), "expected an absolute path")
    for name, other in (("certFile", "keyFile"), ("keyFile", "certFile")):
        if files[name] is None and files[other] is not None:
            raise WrongKeyError(("tls", name), f"missing; it is required with {other}")


def _check_devices(spec: ModelSpec) -> None:
    """Check that a Model requests devices only in spec.gpu, neither their amounts nor their selection elsewhere."""
    for at, resources in ((("spec", "resources"), spec.resources), (("spec", "pod", "resources"), spec.pod.resources)):
        for kind, amounts in (("requests", resources.requests), ("limits", resources.limits)):
            for name in filter(is_device_resource, amounts):
                raise WrongKeyError((*at, kind, name), AMOUNT_RESERVED)
    for name in filter(is_device_annotation, spec.pod.annotations):
        raise WrongKeyError(("spec", "pod", "annotations", name), CHOICE_RESERVED)


def check_settings(settings: Settings) -> None:
    """Check the Settings. Raises WrongKeyError."""
    _check_tls(settings.tls)
    for position, host in enumerate(settings.hosts):
        if not _is_host(host.removesuffix(".")):
            raise WrongKeyError(
                ("hosts", position), "expected a host name such as llm.example, without scheme, port and path"
            )
    for position, origin in enumerate(settings.cors.origins):
        if not ORIGIN.fullmatch(origin):
            raise WrongKeyError(("cors", "origins", position), ORIGIN_WANTED)
    for position, host in enumerate(settings.checks.hosts):
        if not _is_host(host.removesuffix(".")) and not is_address(host):
            raise WrongKeyError(
                ("checks", "hosts", position), "expected a host name or address, without scheme, port and path"
            )
    for position, network in enumerate(settings.checks.service_networks):
        if not is_network(network):
            raise WrongKeyError(("checks", "serviceNetworks", position), "expected a network such as 10.96.0.0/12")
    check_pod(settings.pod, ("pod",))
    seen: set[str] = set()
    for position, device in enumerate(settings.devices):
        check_name(device.name, ("devices", position, "name"))
        if device.name in seen:
            raise WrongKeyError(("devices", position, "name"), f"`{device.name}` occurs twice")
        if not device.memory_bytes:
            raise WrongKeyError(("devices", position, "memory"), "expected a size above 0")
        seen.add(device.name)
    for position, mirror in enumerate(settings.weights.mirrors):
        if not MIRROR.fullmatch(mirror.host):
            raise WrongKeyError(("weights", "mirrors", position, "host"), "expected host, host:port or host/prefix")
    for position, one in enumerate(settings.priority_classes):
        check_object_name(one.name, ("priorityClasses", position, "name"))
        if any(one.least == other.least for other in settings.priority_classes[:position]):
            raise WrongKeyError(("priorityClasses", position, "least"), f"{one.least} occurs twice")
    for position, price in enumerate(settings.prices):
        if not price.device:
            raise WrongKeyError(("prices", position, "device"), "expected the name of a product, such as T4")
        if price.currency != settings.prices[0].currency:
            first = settings.prices[0].currency
            raise WrongKeyError(
                ("prices", position, "currency"),
                f"expected {first}, as in the first entry: all prices use one currency",
            )
        if any(
            (price.device.lower(), price.bought) == (other.device.lower(), other.bought)
            for other in settings.prices[:position]
        ):
            raise WrongKeyError(
                ("prices", position, "device"), f"`{price.device}` occurs twice in class {price.bought}"
            )
    for position, kind in enumerate(settings.nodes):
        check_labels(kind.selector, ("nodes", position, "selector"))
        if not kind.device.model:
            raise WrongKeyError(("nodes", position, "device", "model"), "expected the name of a product, such as T4")
        if not kind.device.memory_bytes:
            raise WrongKeyError(("nodes", position, "device", "memory"), "expected a size above 0")
        _check_slicing(kind, ("nodes", position, "slicing", "replicas"))
        _check_cut(kind, ("nodes", position, "slicing", "cut"))
        _check_giver(kind, ("nodes", position, "slicing"))
        _check_sharing(kind, ("nodes", position, "slicing"))
    _check_cutting(settings)
    check_providers(settings.capacity)
    _check_signatures(settings.weights.signatures, ("weights", "signatures"))
    if settings.prometheus.url is not None:
        check_url(settings.prometheus.url, ("prometheus", "url"))


def _check_signatures(signatures: Signatures, at: Path) -> None:
    if signatures.policy != "off" and not (signatures.keys or signatures.identities):
        raise WrongKeyError((*at, "keys"), f"missing; policy {signatures.policy} requires keys or identities")
    root = signatures.trusted_root
    if bool(signatures.identities) != (root is not None):
        raise WrongKeyError((*at, "trustedRoot"), "identities and trustedRoot must be set together")
    if root is not None and not root.startswith("/"):
        raise WrongKeyError((*at, "trustedRoot"), "expected an absolute path")
    for position, key in enumerate(signatures.keys):
        where = (*at, "keys", position)
        if "PRIVATE KEY" in key:
            raise WrongKeyError(where, "this is a private key, which only the signer may have: set the public key")
        if not key.startswith(("/", BEGIN)):
            raise WrongKeyError(where, f"expected a public key in PEM, which begins with {BEGIN}, or an absolute path")


def _check_cut(kind: NodeKind, at: Path) -> None:
    if kind.slicing is not None and kind.slicing.cut and kind.slicing.kind not in {"mig", "dra"}:
        raise WrongKeyError(at, "requires slicing kind mig or dra: remove it, or change the kind")


def _check_giver(kind: NodeKind, at: Path) -> None:
    """Check keys that only some sharing modes support."""
    slicing = kind.slicing
    if slicing is not None and not slicing.overcommit and slicing.kind not in {"hami", "volcano"}:
        raise WrongKeyError((*at, "overcommit"), "requires slicing kind hami or volcano: remove it, or change the kind")
    if slicing is not None and slicing.template:
        if slicing.kind != "hami":
            raise WrongKeyError((*at, "template"), "requires slicing kind hami: remove it, or change the kind")
        if slicing.template not in TEMPLATES:
            raise WrongKeyError((*at, "template"), f"expected one of {', '.join(TEMPLATES)}")
    if slicing is not None and slicing.alternatives and slicing.kind != "dra":
        raise WrongKeyError((*at, "alternatives"), "requires slicing kind dra: remove it, or change the kind")


def _check_cutting(settings: Settings) -> None:
    check_object_name(settings.cutting.namespace, ("cutting", "namespace"))
    check_object_name(settings.cutting.config_map, ("cutting", "configMap"))
    if settings.cutting.config_map in OPERATORS_OWN:
        raise WrongKeyError(("cutting", "configMap"), "the GPU operator overwrites this ConfigMap: use another one")


def _check_slicing(kind: NodeKind, at: Path) -> None:
    slicing = kind.slicing
    if slicing is None or (slicing.kind not in REPLICATED) == (slicing.replicas is None) or slicing.sharing is not None:
        return
    if slicing.kind not in REPLICATED:
        why = {
            "whole": "a whole device is not shared",
            "kai": "KAI shares a device by memory",
            "dra": "kind dra requires `sharing`",
        }
        what = why.get(slicing.kind, f"with kind {slicing.kind}, nodes report the number of parts of each device")
        raise WrongKeyError(at, f"{what}: remove it, or set kind timeslice or mps")
    raise WrongKeyError(at, f"missing; kind {slicing.kind} requires how many times each device is offered")


def _check_sharing(kind: NodeKind, at: Path) -> None:
    """Check for keys that conflict with sharing a GPU through one claim."""
    slicing = kind.slicing
    if slicing is None or slicing.sharing is None:
        return
    if slicing.kind != "dra":
        raise WrongKeyError((*at, "sharing"), "requires slicing kind dra: remove it, or change the kind")
    for key, said in (("cut", slicing.cut), ("alternatives", slicing.alternatives)):
        if said:
            raise WrongKeyError(
                (*at, key),
                "not allowed with `sharing`, for which Pilotlight claims the whole GPU: remove one of the two",
            )


def is_alias(text: str) -> bool:
    """Whether a document may contain the text as an alias of a Model."""
    try:
        check_model(ModelSpec(engine="command", command=("engine", "{port}"), aliases=(text,)))
    except WrongKeyError:
        return False
    return True
