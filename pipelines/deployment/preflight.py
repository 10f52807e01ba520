"""What has to hold before anything changes: rights, kinds, KServe, nodes, secrets, and the bundle's own bytes."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from components.contract.errors import UserError
from components.store.artifact import Artifact, verify
from pipelines.deployment.api import Namespace, Object

OWN = {
    ("coordination.k8s.io", "leases"): ("get", "create", "update", "delete"),
    ("", "configmaps"): ("get", "create", "update", "delete"),
    ("apps", "deployments"): ("get",),  # KServe's says why it makes no pod
    ("", "pods"): ("list",),
    ("", "pods/log"): ("get",),
    ("", "pods/portforward"): ("get", "create"),
}
ROUTES = {("gateway.networking.k8s.io", "httproutes"): ("get", "create", "patch", "delete")}  # of a canary
APPLIED = ("get", "create", "patch", "delete")
KSERVE = "/apis/apps/v1/namespaces/kserve/deployments/kserve-controller-manager"
STANDARD_SINCE = (0, 16)


def rights(namespace: Namespace, objects: list[Object]) -> set[tuple[str, str, str]]:
    """Return what deploying these objects asks of an account: (API group, resource, verb)."""
    found = {(group, resource, verb) for (group, resource), verbs in OWN.items() for verb in verbs}
    for one in objects:
        group = one["apiVersion"].rpartition("/")[0]
        found |= {(group, str(namespace.plural(one["apiVersion"], one["kind"])), verb) for verb in APPLIED}
    return found


def demand_rights(namespace: Namespace, objects: list[Object]) -> None:
    """Raise :class:`UserError` naming every kind that the cluster lacks, else every right that the account lacks."""
    kinds = sorted({(one["apiVersion"], one["kind"]) for one in objects})
    if lacks := [f"{kind} ({version})" for version, kind in kinds if namespace.plural(version, kind) is None]:
        told = ", ".join(lacks)
        raise UserError(f"the cluster has no {told}; install KServe, or set mode: deployment, or switch the part off")
    missing = sorted(right for right in rights(namespace, objects) if not namespace.may(*right))
    if missing:
        told = ", ".join(f"{verb} {resource}{'.' if group else ''}{group}" for group, resource, verb in missing)
        raise UserError(f"namespace {namespace.name}: this account may not {told}; see manifests/base/roles.yaml")


def findings(namespace: Namespace, values: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    """Yield (is a fault, line) on KServe, nodes and secrets; what this account may not look at is said to be so."""
    yield from _kserve(namespace, values)
    yield from _nodes(namespace, values)
    names = {values["s3"]["secretName"]: (), values["apiKey"]["secretName"]: (values["apiKey"]["secretKey"],)}
    names |= {one["name"]: () for one in values["imagePullSecrets"]}
    for name, keys in names.items():
        if name:
            yield from _secret(namespace, name, keys)


def damaged(bundle: Artifact) -> list[str]:
    """Read every file of the bundle back from the store; return what is missing or altered."""
    with tempfile.TemporaryDirectory() as scratch:
        return verify(bundle, Path(scratch))


def _kserve(namespace: Namespace, values: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    mode = values["kserve"]["deploymentMode"]
    if values["mode"] != "kserve":
        return
    found = namespace.elsewhere(KSERVE)
    if found is None:
        yield False, "KServe's version: not to be seen by this account, not checked"
        return
    tag = found["spec"]["template"]["spec"]["containers"][0]["image"].partition("@")[0].rpartition(":v")[2]
    try:
        major, minor = (int(part) for part in tag.split(".")[:2])
    except ValueError:
        yield False, f"KServe's version: {tag} says nothing, not checked"
        return
    if mode == "Standard" and (major, minor) < STANDARD_SINCE:
        yield True, f"KServe {tag} does not know mode Standard; set kserve.deploymentMode to RawDeployment"
    else:
        yield False, f"KServe {tag}, mode {mode}"


def _nodes(namespace: Namespace, values: dict[str, Any]) -> Iterator[tuple[bool, str]]:
    found = namespace.elsewhere("/api/v1/nodes")
    wanted = {key: value for key, value in values["nodeSelector"].items() if value is not None}
    needed = {key: value for key, value in values["resources"]["requests"].items() if "/" in key and value}
    told = ", ".join([f"{key}={value}" for key, value in wanted.items()] + [f"{one} free" for one in needed])
    if found is None:
        yield False, "nodes: not to be seen by this account, not checked"
        return
    fit = [
        one["metadata"]["name"]
        for one in found["items"]
        if wanted.items() <= one["metadata"].get("labels", {}).items()
        and not one["spec"].get("unschedulable")
        and all(int(one["status"].get("allocatable", {}).get(key, 0)) >= int(value) for key, value in needed.items())
    ]
    if fit:
        yield False, f"nodes: {len(fit)} with {told or 'no demands'}"
    else:
        yield False, f"nodes: none with {told}; the pod waits unless an autoscaler makes one"


def _secret(namespace: Namespace, name: str, keys: tuple[str, ...]) -> Iterator[tuple[bool, str]]:
    if not namespace.may("", "secrets", "get"):
        yield False, f"secret {name}: not to be seen by this account, not checked"
        return
    found = namespace.get("v1", "Secret", name)
    lacks = [key for key in keys if key not in (found or {}).get("data", {})]
    if found is None or lacks:
        yield (
            True,
            f"secret {name}: {'has no ' + ', '.join(lacks) if found else 'is not there'}; kubectl create secret",
        )
