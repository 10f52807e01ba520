"""What the manifests promise, as functions over objects: who may ask Kubernetes what, and which pod reaches where."""

from ipaddress import ip_address, ip_network
from typing import Any

Objects = list[dict[str, Any]]


def rights(objects: Objects, account: str) -> set[tuple[str, str, str]]:
    """Return an account's (API group, resource, verb), through every binding that names it."""
    roles = {one["metadata"]["name"]: one for one in objects if one["kind"] == "Role"}
    bound = [
        roles[one["roleRef"]["name"]]
        for one in objects
        if one["kind"] == "RoleBinding" and account in [subject["name"] for subject in one["subjects"]]
    ]
    return {
        (group, resource, verb)
        for role in bound
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def excess(objects: Objects) -> list[str]:
    """Return what nobody here may be given: whole clusters, wildcards, secrets, shells, other people's rights."""
    found = [f"{one['kind']} {one['metadata']['name']}" for one in objects if one["kind"].startswith("ClusterRole")]
    accounts = [one["metadata"]["name"] for one in objects if one["kind"] == "ServiceAccount"]
    for account in accounts:
        for right in sorted(rights(objects, account)):
            group, resource, verb = right
            forbidden = resource in {"secrets", "pods/exec", "pods/attach"} or group.startswith("rbac.")
            if "*" in right or forbidden or verb in {"impersonate", "escalate", "bind", "deletecollection"}:
                found.append(f"{account}: {'/'.join(right)}")
    return found


def reaches(
    objects: Objects, labels: dict[str, str], address: str, port: int, peer: dict[str, str] | None = None
) -> bool:
    """Say whether a pod with ``labels`` may open a TCP connection to ``address``, the pod with labels ``peer`` if any.

    As Kubernetes reads policies: those that select the pod add up; without any, everything is allowed.
    """
    chosen = [
        one["spec"]
        for one in objects
        if one["kind"] == "NetworkPolicy"
        and "Egress" in one["spec"]["policyTypes"]
        and selects(one["spec"]["podSelector"], labels)
    ]
    if not chosen:
        return True
    return any(
        (not rule.get("ports") or port in [one["port"] for one in rule["ports"] if one["protocol"] == "TCP"])
        and any(_is(to, address, peer) for to in rule["to"])
        for policy in chosen
        for rule in policy.get("egress", ())
    )


def _is(to: dict[str, Any], address: str, peer: dict[str, str] | None) -> bool:
    if block := to.get("ipBlock"):
        inside = ip_address(address) in ip_network(block["cidr"])
        return inside and not any(ip_address(address) in ip_network(one) for one in block.get("except", ()))
    return peer is not None and "namespaceSelector" not in to and selects(to["podSelector"], peer)


def selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    """Say whether a label selector takes in ``labels``."""
    for one in selector.get("matchExpressions", ()):
        inside = labels.get(one["key"]) in one["values"]
        if inside is not {"In": True, "NotIn": False}[one["operator"]]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()
