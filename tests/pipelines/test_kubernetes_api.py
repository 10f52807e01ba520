"""The fake of the Kubernetes API, by Kubernetes' own client: what each verb does, and what it refuses."""

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client, watch
from kubernetes.client.exceptions import ApiException

from tests.kubernetes_api.controllers import playing
from tests.kubernetes_api.refusal import REASONS
from tests.kubernetes_api.server import ADMIN, Api, serving
from tests.kubernetes_api.state import NAMESPACE
from tests.kubernetes_api.trainjobs import flapping, job

TRAINJOBS = ("trainer.kubeflow.org", "v1alpha1", NAMESPACE, "trainjobs")


@pytest.fixture
def api() -> Iterator[Api]:
    with serving() as found:
        yield found


@pytest.fixture
def core(api: Api) -> client.CoreV1Api:
    return client.CoreV1Api(api.client())


@pytest.fixture
def custom(api: Api) -> client.CustomObjectsApi:
    return client.CustomObjectsApi(api.client())


@contextlib.contextmanager
def refused(code: int, *words: str) -> Iterator[None]:
    with pytest.raises(ApiException) as caught:
        yield
    status = json.loads(caught.value.body)
    assert (caught.value.status, status["code"], status["kind"]) == (code, code, "Status")
    assert status["reason"] in {*REASONS.values(), "AlreadyExists"}
    for word in words:
        assert word in status["message"]


def config(name: str = "one", data: dict[str, str] | None = None, **metadata: Any) -> dict[str, Any]:
    metadata = {"name": name, **metadata}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data or {"key": "value"}}


def trainjob(name: str = "job", **spec: Any) -> dict[str, Any]:
    spec = {"runtimeRef": {"name": "qdflash-train", "kind": "TrainingRuntime"}, **spec}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": spec,
    }


def apply(api: Api, one: dict[str, Any], manager: str, path: str = "api/v1", plural: str = "configmaps", **query: Any):
    return api.client().call_api(
        f"/{path}/namespaces/{NAMESPACE}/{plural}/{one['metadata']['name']}",
        "PATCH",
        query_params=list({"fieldManager": manager, **query}.items()),
        header_params={"Content-Type": "application/apply-patch+yaml"},
        body=one,
        response_type="object",
        auth_settings=["BearerToken"],
    )[0]


def test_create(core: client.CoreV1Api) -> None:
    made = core.create_namespaced_config_map(NAMESPACE, config()).metadata
    assert made.uid
    assert made.creation_timestamp
    assert int(made.resource_version) > 0
    with refused(409, "already exists"):
        core.create_namespaced_config_map(NAMESPACE, config())
    with refused(422, "dat"):
        core.create_namespaced_config_map(NAMESPACE, config("two") | {"dat": {}})
    with refused(422, "Not_A_Name"):
        core.create_namespaced_config_map(NAMESPACE, config("Not_A_Name"))
    with refused(400, "does not match"):
        core.create_namespaced_config_map(NAMESPACE, config("two") | {"kind": "Secret"})
    with refused(400, "resourceVersion"):
        core.create_namespaced_config_map(NAMESPACE, config("two", resourceVersion="1"))
    with refused(404, "namespaces"):
        core.create_namespaced_config_map("elsewhere", config())


def test_read_and_select(core: client.CoreV1Api) -> None:
    for name, colour in (("one", "red"), ("two", "blue"), ("three", "green")):
        core.create_namespaced_config_map(NAMESPACE, config(name, labels={"colour": colour}))

    def named(labels: str) -> list[str]:
        return [one.metadata.name for one in core.list_namespaced_config_map(NAMESPACE, label_selector=labels).items]

    assert named("colour=red") == ["one"]
    assert named("colour!=red,colour") == ["two", "three"]
    assert named("colour in (red, blue),colour notin (blue)") == ["one"]
    assert named("!colour") == []
    with refused(400, "unable to parse"):
        named("colour=red,;")
    assert core.read_namespaced_config_map("one", NAMESPACE).data == {"key": "value"}
    with refused(404, 'configmaps "four" not found'):
        core.read_namespaced_config_map("four", NAMESPACE)


def test_replace(core: client.CoreV1Api) -> None:
    made = core.create_namespaced_config_map(NAMESPACE, config())
    made.data = {"key": "new"}
    newer = core.replace_namespaced_config_map("one", NAMESPACE, made)
    assert int(newer.metadata.resource_version) > int(made.metadata.resource_version)
    with refused(409, "has been modified"):
        core.replace_namespaced_config_map("one", NAMESPACE, made)
    with refused(422, "dat"):
        core.replace_namespaced_config_map("one", NAMESPACE, config() | {"dat": {}})
    with refused(404):
        core.replace_namespaced_config_map("two", NAMESPACE, config("two"))
    with refused(400, "does not match"):
        core.replace_namespaced_config_map("one", NAMESPACE, config("two"))


def test_patch_and_generation(api: Api, custom: client.CustomObjectsApi) -> None:
    made = custom.create_namespaced_custom_object(*TRAINJOBS, trainjob())
    assert made["metadata"]["generation"] == 1
    patched = custom.patch_namespaced_custom_object(*TRAINJOBS, "job", {"metadata": {"labels": {"a": "b"}}})
    assert patched["metadata"]["generation"] == 1
    patched = custom.patch_namespaced_custom_object(*TRAINJOBS, "job", {"spec": {"suspend": True}})
    assert patched["metadata"]["generation"] == 2
    assert custom.patch_namespaced_custom_object(*TRAINJOBS, "job", {"spec": {"suspend": True}}) == patched
    stale = {"metadata": {"resourceVersion": made["metadata"]["resourceVersion"]}, "spec": {"suspend": False}}
    with refused(409, "has been modified"):
        custom.patch_namespaced_custom_object(*TRAINJOBS, "job", stale)
    with refused(400, "merge patch"):
        custom.patch_namespaced_custom_object(*TRAINJOBS, "job", [{"op": "remove", "path": "/spec/suspend"}])
    with refused(404):
        custom.patch_namespaced_custom_object(*TRAINJOBS, "other", {"spec": {}})


def test_custom_kinds_have_their_schema(custom: client.CustomObjectsApi) -> None:
    with refused(422, "podTemplateOverrides"):
        custom.create_namespaced_custom_object(*TRAINJOBS, trainjob(podTemplateOverrides=[]))
    custom.create_namespaced_custom_object(*TRAINJOBS, trainjob())
    with refused(422, "suspend"):
        custom.patch_namespaced_custom_object(*TRAINJOBS, "job", {"spec": {"suspend": "yes"}})
    with refused(422, "lastTransitionTime"):
        condition = {"type": "Complete", "status": "True", "reason": "Done", "message": ""}
        custom.patch_namespaced_custom_object_status(*TRAINJOBS, "job", {"status": {"conditions": [condition]}})


def test_status_is_apart(custom: client.CustomObjectsApi) -> None:
    status = {"jobsStatus": [{"name": "n", "active": 0, "failed": 0, "ready": 0, "succeeded": 1, "suspended": 0}]}
    made = custom.create_namespaced_custom_object(*TRAINJOBS, trainjob() | {"status": status})
    assert "status" not in made
    assert "status" not in custom.patch_namespaced_custom_object(*TRAINJOBS, "job", {"status": status})
    with_spec = {"status": status, "spec": {"suspend": True}}
    told = custom.patch_namespaced_custom_object_status(*TRAINJOBS, "job", with_spec)
    assert (told["status"], told["spec"], told["metadata"]["generation"]) == (status, made["spec"], 1)
    with refused(409):
        custom.replace_namespaced_custom_object_status(*TRAINJOBS, "job", made | {"status": status})


def test_kinds_that_are_not_installed(api: Api, custom: client.CustomObjectsApi) -> None:
    api.state.installed.remove("trainer.kubeflow.org")
    with refused(404, "could not find the requested resource"):
        custom.list_namespaced_custom_object(*TRAINJOBS)


def test_server_side_apply(api: Api, core: client.CoreV1Api) -> None:
    made = apply(api, config(data={"a": "1", "b": "2"}), "one")
    assert apply(api, config(data={"a": "1", "b": "2"}), "one") == made  # a second time changes nothing
    with refused(409, 'conflict with "one"', ".data.a"):
        apply(api, config(data={"a": "9"}), "two")
    assert apply(api, config(data={"a": "1", "c": "3"}), "two")["data"] == {"a": "1", "b": "2", "c": "3"}
    assert apply(api, config(data={"b": "2"}), "one")["data"] == {"a": "1", "b": "2", "c": "3"}  # a is two's as well
    assert apply(api, config(data={"c": "3"}), "two")["data"] == {"b": "2", "c": "3"}
    assert apply(api, config(data={"c": "4"}), "one", force="true")["data"] == {"c": "4"}
    core.patch_namespaced_config_map("one", NAMESPACE, {"data": {"c": "5"}}, field_manager="by-hand")
    with refused(409, 'conflict with "by-hand"'):
        apply(api, config(data={"c": "4"}), "one")
    with refused(409, "has been modified"):
        apply(api, config(resourceVersion="1"), "one")
    with refused(400, "fieldManager"):
        apply(api, config(), "")
    with refused(422, "dat"):
        apply(api, config() | {"dat": {}}, "one")


def test_dry_runs_change_nothing(api: Api) -> None:
    assert apply(api, config(), "one", dryRun="All")["metadata"]["uid"]
    with refused(422):
        apply(api, config() | {"dat": {}}, "one", dryRun="All")
    made = apply(api, config(), "one")
    assert apply(api, config(data={"key": "other"}), "one", dryRun="All")["data"] == {"key": "other"}
    assert apply(api, config(), "one") == made


def test_delete(api: Api, core: client.CoreV1Api) -> None:
    owner = core.create_namespaced_config_map(NAMESPACE, config("owner"))
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner.metadata.uid}
    for name in ("held", "free"):
        core.create_namespaced_config_map(NAMESPACE, config(name, ownerReferences=[reference]))
    core.patch_namespaced_config_map("held", NAMESPACE, {"metadata": {"labels": {"a": "b"}}})
    held = config("held", ownerReferences=[reference], finalizers=["example.org/hold"])
    core.replace_namespaced_config_map("held", NAMESPACE, held)
    with refused(409, "precondition"):
        core.delete_namespaced_config_map("owner", NAMESPACE, body={"preconditions": {"uid": "another"}})
    with refused(422, "propagationPolicy"):
        core.delete_namespaced_config_map("owner", NAMESPACE, propagation_policy="Sideways")
    core.delete_namespaced_config_map("owner", NAMESPACE)
    (left,) = core.list_namespaced_config_map(NAMESPACE).items
    assert left.metadata.name == "held"
    assert left.metadata.deletion_timestamp
    core.replace_namespaced_config_map("held", NAMESPACE, config("held", finalizers=[]))
    with refused(404):
        core.delete_namespaced_config_map("held", NAMESPACE)


def test_orphans_stay(core: client.CoreV1Api) -> None:
    owner = core.create_namespaced_config_map(NAMESPACE, config("owner"))
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner.metadata.uid}
    core.create_namespaced_config_map(NAMESPACE, config("child", ownerReferences=[reference]))
    core.delete_namespaced_config_map("owner", NAMESPACE, propagation_policy="Orphan")
    assert not core.read_namespaced_config_map("child", NAMESPACE).metadata.owner_references


def test_watch(api: Api, core: client.CoreV1Api) -> None:
    since = core.list_namespaced_config_map(NAMESPACE).metadata.resource_version
    core.create_namespaced_config_map(NAMESPACE, config("one", labels={"a": "b"}))
    core.create_namespaced_config_map(NAMESPACE, config("other"))
    writer = threading.Thread(
        target=lambda: (
            time.sleep(0.1),
            core.patch_namespaced_config_map("one", NAMESPACE, {"data": {"key": "new"}}),
            core.patch_namespaced_config_map("one", NAMESPACE, {"metadata": {"labels": {"a": None}}}),
        )
    )
    writer.start()
    events = watch.Watch().stream(
        core.list_namespaced_config_map,
        NAMESPACE,
        label_selector="a=b",
        resource_version=since,
        timeout_seconds=10,
    )
    seen = [(event["type"], event["object"].metadata.name) for _, event in zip(range(3), events, strict=False)]
    assert seen == [("ADDED", "one"), ("MODIFIED", "one"), ("DELETED", "one")]
    writer.join()
    api.state.forget()
    with pytest.raises(ApiException, match="too old"):
        list(
            watch.Watch().stream(core.list_namespaced_config_map, NAMESPACE, resource_version=since, timeout_seconds=1)
        )


def test_kubectl_finds_its_way(api: Api, tmp_path: Path) -> None:
    """Another client than Python's, which looks every kind up before it asks for one."""
    api.state.rights[""] = ("anonymous", None)  # kubectl sends no token without TLS
    (tmp_path / "kubeconfig").write_text(api.kubeconfig())
    (tmp_path / "one.json").write_text(json.dumps(config(data={"a": "1"})))
    (tmp_path / "two.json").write_text(json.dumps(config(data={"a": "2"})))

    def kubectl(*words: str, cwd: Path = tmp_path) -> subprocess.CompletedProcess[str]:
        argv = [
            Path(sys.executable).with_name("kubectl"),
            "--kubeconfig=kubeconfig",
            f"--cache-dir={cwd}/cache",
            *words,
        ]
        return subprocess.run(argv, capture_output=True, text=True, cwd=cwd)

    apply = ("apply", "--server-side", "--validate=false", "-f")
    assert kubectl(*apply, "one.json").stdout == "configmap/one serverside-applied\n"
    clash = kubectl(*apply, "two.json", "--field-manager=another")
    assert clash.returncode == 1
    assert 'conflict with "kubectl": .data.a' in clash.stderr
    assert kubectl(*apply, "two.json", "--field-manager=another", "--force-conflicts").returncode == 0
    found = json.loads(kubectl("get", "configmap/one", "--output=json", "--show-managed-fields").stdout)
    owners = {one["manager"]: one["fieldsV1"] for one in found["metadata"]["managedFields"]}
    assert found["data"] == {"a": "2"}
    assert owners == {"another": {"f:data": {"f:a": {}}}}
    assert kubectl("get", "trainjobs").stderr.strip() == "No resources found in qdflash namespace."
    assert kubectl("wait", "--for=delete", "configmap/one", "--timeout=0.1s").returncode == 1
    assert kubectl("delete", "configmap/one").stdout.startswith('configmap "one" deleted')
    assert "NotFound" in kubectl("get", "configmap/one").stderr


def test_tokens_and_rights(api: Api) -> None:
    with refused(401):
        client.CoreV1Api(api.client("a guess")).list_namespaced_config_map(NAMESPACE)
    needed = {("", "configmaps", verb) for verb in ("get", "list", "watch", "create", "update", "patch", "delete")}
    calls = {
        "get": lambda core: core.read_namespaced_config_map("one", NAMESPACE),
        "list": lambda core: core.list_namespaced_config_map(NAMESPACE),
        "watch": lambda core: core.list_namespaced_config_map(NAMESPACE, watch=True, timeout_seconds=1),
        "create": lambda core: core.create_namespaced_config_map(NAMESPACE, config("two")),
        "update": lambda core: core.replace_namespaced_config_map("one", NAMESPACE, config()),
        "patch": lambda core: core.patch_namespaced_config_map("one", NAMESPACE, {}),
        "delete": lambda core: core.delete_namespaced_config_map("one", NAMESPACE),
    }
    client.CoreV1Api(api.client(ADMIN)).create_namespaced_config_map(NAMESPACE, config())
    for verb, call in calls.items():
        api.state.rights["clerk"] = ("clerk", needed - {("", "configmaps", verb)})
        with refused(403, f"cannot {verb} resource", "clerk"):
            call(client.CoreV1Api(api.client("clerk")))
    api.state.rights["clerk"] = ("clerk", needed)
    with refused(403, "at the cluster scope"):
        client.CoreV1Api(api.client("clerk")).list_node()


def test_an_absent_server_says_try_again(api: Api, core: client.CoreV1Api) -> None:
    api.state.unavailable = 1
    with refused(503):
        core.list_namespaced_config_map(NAMESPACE)
    core.list_namespaced_config_map(NAMESPACE)


def test_a_trainjob_is_played_with_its_log(api: Api, core: client.CoreV1Api, custom: client.CustomObjectsApi) -> None:
    with playing(api, {"TrainJob": job(["step 1", "step 2"], step=0.1)}):
        custom.create_namespaced_custom_object(*TRAINJOBS, trainjob(trainer={"numNodes": 2}))
        selector = "jobset.sigs.k8s.io/jobset-name=job,batch.kubernetes.io/job-completion-index=0"
        for _ in range(100):
            pods = core.list_namespaced_pod(NAMESPACE, label_selector=selector).items
            if pods and pods[0].status.phase == "Running":
                break
            time.sleep(0.02)
        lines = watch.Watch().stream(core.read_namespaced_pod_log, pods[0].metadata.name, NAMESPACE, follow=True)
        assert list(lines) == ["step 1 (0)", "step 2 (0)"]
        assert settled(custom) == "Complete"
        with refused(400, "not found"):
            core.read_namespaced_pod_log(pods[0].metadata.name, NAMESPACE, previous=True)
        custom.delete_namespaced_custom_object(*TRAINJOBS, "job")
        assert core.list_namespaced_pod(NAMESPACE).items == []


@pytest.mark.parametrize(
    ("script", "end"), [(job(["x"], "Failed", 3), "Failed"), (flapping(["x"]), "Complete")], ids=["fails", "flaps"]
)
def test_a_trainjob_fails_or_flaps(api: Api, custom: client.CustomObjectsApi, script: Any, end: str) -> None:
    with playing(api, {"TrainJob": script}):
        custom.create_namespaced_custom_object(*TRAINJOBS, trainjob())
        assert settled(custom) == end


def settled(custom: client.CustomObjectsApi) -> str:
    """Wait for a TrainJob's last condition."""
    for _ in range(200):
        found = custom.get_namespaced_custom_object(*TRAINJOBS, "job").get("status", {}).get("conditions", ())
        if ended := [
            one["type"] for one in found if one["type"] in ("Complete", "Failed") and one["status"] == "True"
        ]:
            return ended[0]
        time.sleep(0.05)
    raise AssertionError("the TrainJob did not end")
