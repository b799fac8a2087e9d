"""Our CustomResourceDefinitions on a real API server: it refuses what files are refused for, in the same words."""

from __future__ import annotations

import asyncio
import re
import uuid

import aiohttp
import pytest

from autoscaler.crds import LATER, MODEL, TENANT
from autoscaler.crds.rules import RULES
from autoscaler.documents import one
from autoscaler.drivers.kubernetes.access import access
from autoscaler.drivers.kubernetes.api import MERGE, Api, ApiError, Object
from autoscaler.expected import WrongKeyError
from autoscaler.model import ModelSpec
from autoscaler.not_yet import KEYS, MESSAGE
from tests.cluster.definitions import API_VERSION, SERVED_S_MAX, TENANTS, document, model, models, tenant
from tests.cluster.plane import Plane

pytestmark = pytest.mark.standard

HASH = "ab" * 32


def adapted(artifact: str) -> Object:
    adapters = [{"name": "x", "artifact": artifact}]
    return model("a", engine="vllm", command=[], artifact="hf://a/b", adapters=adapters)


WRONG: list[tuple[str, Object]] = [
    ("range", model("a", replicas={"min": 2})),
    ("window", model("a", replicas={"schedule": [{"cron": "0 8 * * *", "seconds": 3600, "min": 2}]})),
    ("artifact", model("a", engine="llama.cpp", command=[])),
    ("artifact or hub", model("a", engine="vllm", command=[])),
    ("hub", model("a", engine="vllm", command=[], artifact="hf://a/b/c")),
    ("bucket", model("a", engine="llama.cpp", command=[], artifact="s3://Bucket/a")),
    ("registry", model("a", engine="vllm", command=[], artifact="oci://x")),
    ("registry of another", model("a", engine="ollama", command=[], artifact="oci://r.io/a:1")),
    ("claim", model("a", engine="vllm", command=[], artifact="pvc://claim/../a")),
    ("scheme of another", model("a", engine="ollama", command=[], artifact="hf://a/b")),
    ("path", model("a", artifact="models/a.gguf")),
    ("no path", model("a", artifact="file:///")),
    ("command", model("a", engine="ollama")),
    ("no port", model("a", command=["engine"])),
    ("no command", model("a", command=[])),
    ("path placeholder", model("a", command=["{port}", "{model_path}"])),
    ("context placeholder", model("a", command=["{port}", "{context_tokens}"])),
    ("no adapters", model("a", engine="ollama", command=[], adapters=[{"name": "x", "artifact": "file:///x"}])),
    ("adapter's name", model("a", adapters=[{"name": "x:", "artifact": "file:///x"}])),
    ("adapter's scheme", model("a", adapters=[{"name": "x", "artifact": "pvc://x"}])),
    ("adapter's registry", adapted("oci://r.io/X:1")),
    ("adapter's hub", adapted("hf://a/b/c")),
    ("adapter's bucket", adapted("s3://b")),
    ("adapter's store", model("a", adapters=[{"name": "x", "artifact": "hf://a/b"}])),
    ("adapter's path", model("a", adapters=[{"name": "x", "artifact": "file:///x,y"}])),
    ("no product", model("a", gpu={"models": ["*h100*", ""]})),
    ("own name", model("a", aliases=["a"])),
    ("alias", model("a", aliases=["-"])),
    ("readiness path", model("a", readinessPath="health")),
    ("server name", model("a", tls={"serverName": "a_b"})),
    ("requests", model("a", resources={"requests": {"nvidia.com/gpu": 1}})),
    ("labels", model("a", pod={"labels": {"pilotlight.dev/model": "x"}})),
    ("annotations", model("a", pod={"annotations": {"app.kubernetes.io/managed-by": "x"}})),
    (
        "args",
        model(
            "a", engine="llama.cpp", command=[], artifact="file:///a", args=["--lora_scaled=1"],
            adapters=[{"name": "x", "artifact": "file:///x"}],
        ),
    ),
]  # fmt: skip


def sentence(wrong: Object) -> WrongKeyError:
    """What a file with it is refused with."""
    with pytest.raises(WrongKeyError) as caught:
        one(wrong)
    return caught.value


async def refusal(api: Api, path: str, body: Object) -> str:
    with pytest.raises(ApiError) as caught:
        await api.create(path, body)
    assert caught.value.status == 422, caught.value
    return caught.value.message


async def test_a_rule_refuses_with_the_sentence_that_files_are_refused_with(served: Api, namespace: str) -> None:
    for what, wrong in WRONG:
        said = await refusal(served, models(namespace), wrong)
        expected = sentence(wrong)
        assert expected.message.partition(", which")[0] in said, what
        assert ".".join(map(str, expected.path[:2])) in said, what
        assert said.count("expected") + said.count("needs") <= 2, f"{what}: no rule speaks for another: {said}"


async def test_weights_of_a_registry_are_taken_of_files_and_of_resources(served: Api, namespace: str) -> None:
    of_registry = model("a", engine="vllm", command=[], artifact=f"oci://r.io/a@sha256:{HASH}")
    for name, taken in enumerate(
        (of_registry, *map(adapted, (f"oci://r.io/a@sha256:{HASH}", "hf://a/b", "s3://abc/d/")))
    ):
        taken["metadata"]["name"] = f"a{name}"
        assert isinstance(one(taken).spec, ModelSpec), "no file is refused for it"
        await served.create(models(namespace), taken)


def test_every_rule_is_seen_to_refuse() -> None:
    """Each sentence of the rules is one of those above."""
    seen = [sentence(wrong).message for _, wrong in WRONG]
    for rules in RULES.values():
        for rule in rules:
            words = max(re.findall(r"'((?:[^'\\]|\\.)*)'", rule.message), key=len) if rule.says else rule.message
            words = words.replace("\\'", "'").strip()
            assert any(words in message for message in seen), rule


async def test_keys_that_are_not_in_force_yet_are_refused_and_not_dropped(served: Api, namespace: str) -> None:
    values = {"string": "x", "boolean": True, "number": 1, "array": [], "object": {}}
    for kind, path, make in ((MODEL, models(namespace), model), (TENANT, TENANTS, tenant)):
        for key in KEYS[kind.name]:
            value: object = values[str(LATER.get(key, {"type": "object"})["type"])]
            *above, last = key.removeprefix("spec.").split(".")
            spec: Object = {last: value}
            for part in reversed(above):
                spec = {part: spec}
            said = await refusal(served, path, make("later", **spec))
            assert key in said
            assert MESSAGE in said


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"aliases": ["x", "x"]}, 'spec.aliases[1]: Duplicate value: "x"'),
        ({"adapters": [{"name": "x", "artifact": "file:///x"}] * 2}, "spec.adapters[1]: Duplicate value"),
        ({"engine": "tei"}, 'spec.engine: Unsupported value: "tei"'),
        ({"queue": {"bytesMax": "1GB"}}, "spec.queue.bytesMax"),
        ({"idleSeconds": "soon"}, "spec.idleSeconds"),
        ({"idleSeconds": -1}, "spec.idleSeconds"),
        ({"start": {"secondsMax": 0}}, "spec.start.secondsMax"),
        ({"gpu": {"isolation": "good"}}, "spec.gpu.isolation"),
        ({"env": ["A=b"]}, "spec.env"),
    ],
)
async def test_a_value_of_the_wrong_kind_is_refused_by_its_path(
    served: Api, namespace: str, spec: Object, said: str
) -> None:
    assert said in await refusal(served, models(namespace), model("a", **spec))


async def test_a_tenant_s_keys_are_hashes_that_differ(served: Api) -> None:
    assert "spec.keys[0].sha256" in await refusal(served, TENANTS, tenant("a", keys=[{"sha256": "secret"}]))
    twice = [{"sha256": HASH}, {"sha256": HASH}]
    assert "spec.keys[1]: Duplicate value" in await refusal(served, TENANTS, tenant("a", keys=twice))
    late = [{"sha256": HASH, "expiresAt": "tomorrow"}]
    assert "spec.keys[0].expiresAt" in await refusal(served, TENANTS, tenant("a", keys=late))


async def test_defaults_are_filled_in_and_mean_the_same(served: Api, namespace: str) -> None:
    sizes = {"gpu": {"memory": "20Gi"}, "queue": {"bytesMax": 1000}, "idleSeconds": 5}
    written = model("a", aliases=["org/name:tag"], tls={}, env={"A": "b", "C": {"valueFrom": {}}}, **sizes)
    made = await served.create(models(namespace), written)
    spec = made["spec"]
    assert spec["replicas"] == {"min": 0, "max": 1, "schedule": []}
    assert "slots" not in spec, "that is the engine's"
    assert (spec["queue"]["waitSecondsMax"], spec["residencySeconds"]) == (540, "auto")
    del spec["env"]["C"], written["spec"]["env"]["C"]
    assert one(document("Model", "a", spec=spec)) == one(written)


async def test_unknown_keys_are_refused_by_those_who_ask_for_it(served: Api, namespace: str) -> None:
    with pytest.raises(ApiError, match=r'unknown field "spec.gpu.memori"') as caught:
        await served.create(f"{models(namespace)}?fieldValidation=Strict", model("a", gpu={"memori": "1Gi"}))
    assert caught.value.status == 400
    made = await served.create(models(namespace), model("a", gpu={"memori": "1Gi"}))
    assert "memori" not in made["spec"]["gpu"], "else it is dropped, as everywhere in Kubernetes"


async def test_status_is_apart_from_spec(served: Api, namespace: str) -> None:
    path = models(namespace)
    made = await served.create(path, model("a") | {"status": {"observedGeneration": 7}})
    assert "status" not in made
    ready = {"type": "Ready", "status": "True", "reason": "Serving", "message": "", "lastTransitionTime": "2027-01-31T12:00:00Z"}  # fmt: skip  # noqa: E501
    learned = {"startSeconds": [1.5], "tries": 1, "retryAt": "2027-01-31T12:00:00.5Z", "more": {"x": 1}}
    status = {
        "observedGeneration": 1, "replicas": {"ready": 2, "fallingAsleep": 1}, "demand": {"waiting": 3, "running": 4},
        "conditions": [ready], "lastStart": {"seconds": 2.5, "phases": {"load": 2.0}, "reason": "3 waiting"},
        "learned": learned,
    }  # fmt: skip
    body = {"spec": {"slots": 9}, "status": status}
    after = await served.patch(f"{path}/a/status", body, MERGE, fieldValidation="Strict")
    assert after["status"] == status, "what is learnt may have more keys"
    assert "slots" not in after["spec"]
    assert after["metadata"]["generation"] == 1
    changed = await served.patch(f"{path}/a", body, MERGE)
    assert (changed["metadata"]["generation"], changed["spec"]["slots"]) == (2, 9)


async def test_conditions_of_two_writers_are_kept_by_their_type(served: Api, namespace: str) -> None:
    path = models(namespace)
    await served.create(path, model("a"))
    for owner, kind in (("one", "Ready"), ("two", "Adopted")):
        condition = {
            "type": kind, "status": "True", "reason": "X", "message": "", "lastTransitionTime": "2027-01-31T12:00:00Z",
        }  # fmt: skip
        await served.apply(f"{path}/a/status", document("Model", "a", status={"conditions": [condition]}), owner)
    found = await served.get(f"{path}/a")
    assert [one["type"] for one in found["status"]["conditions"]] == ["Ready", "Adopted"]


async def listed(api: Api) -> list[Object]:
    """What the server says that there is of our group."""
    found: list[Object] = (await api.get(f"/apis/{API_VERSION}"))["resources"]
    return found


async def test_columns_names_and_selectors(served: Api, plane: Plane, namespace: str) -> None:
    path = models(namespace)
    await served.create(path, model("a"))
    await served.create(path, model("b", engine="ollama", command=[], paused=True))
    ready = {"type": "Ready", "status": "False", "reason": "Waiting", "message": "for a GPU", "lastTransitionTime": "2027-01-31T12:00:00Z"}  # fmt: skip  # noqa: E501
    status = {"replicas": {"ready": 2}, "demand": {"waiting": 3, "running": 4}, "conditions": [ready]}
    await served.patch(f"{path}/a/status", {"status": status}, MERGE)
    server = await access(plane.kubeconfig)
    headers = await server.headers() | {"Accept": "application/json;as=Table;v=v1;g=meta.k8s.io"}
    async with (
        aiohttp.ClientSession() as session,
        session.get(server.server + path, headers=headers, ssl=server.tls()) as answer,
    ):
        table = await answer.json()
    columns = [(column["name"], column["priority"]) for column in table["columnDefinitions"]]
    assert columns == [("Name", 0), *((name, priority) for name, _, _, priority in MODEL.columns)]
    first = table["rows"][0]["cells"]
    assert first[:5] == ["a", 2, 3, 4, "Waiting"]
    assert first[6:] == ["command", "for a GPU"]
    for selector in ("spec.engine=ollama", "spec.paused=true"):
        found = await served.get(path, fieldSelector=selector)
        assert [item["metadata"]["name"] for item in found["items"]] == ["b"]
    async with asyncio.timeout(SERVED_S_MAX):  # a kind is listed a little after it is served
        while not {"models", "tenants"} <= {one["name"] for one in await listed(served)}:
            await asyncio.sleep(0.05)
    resources = await listed(served)
    short = {one["name"]: (one.get("shortNames"), one["namespaced"]) for one in resources if "/" not in one["name"]}
    assert short == {"models": (["plm"], True), "tenants": (["plt"], False)}
    assert not any(one["name"].endswith("/scale") for one in resources), "Replicas are the autoscaler's"


async def test_a_tenant_as_small_as_it_can_be(served: Api) -> None:
    name = f"t-{uuid.uuid4().hex[:8]}"
    made = await served.create(TENANTS, document("Tenant", name))
    assert made["spec"] == {"weight": 1, "keys": [], "priorityMax": 0}
    await served.delete(f"{TENANTS}/{name}")
