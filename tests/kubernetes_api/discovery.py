"""What any account may ask of the fake: the version, the kinds of a group, and what it may do itself."""

import re
from typing import Any

from tests.kubernetes_api.refusal import Refused
from tests.kubernetes_api.resources import RESOURCES

Rights = set[tuple[str, str, str]] | None
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
REVIEW = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"


def allows(rights: Rights, group: str, resource: str, verb: str) -> bool:
    """Say whether rights (None: all) hold (group, resource, verb)."""
    return rights is None or (group, resource, verb) in rights


def reviewed(body: dict[str, Any], rights: Rights) -> dict[str, Any]:
    """Answer a SelfSubjectAccessReview."""
    asked = body["spec"]["resourceAttributes"]
    plural = asked["resource"] + (f"/{asked['subresource']}" if asked.get("subresource") else "")
    return body | {"status": {"allowed": allows(rights, asked.get("group", ""), plural, asked["verb"])}}


def discovered(path: str, installed: set[str]) -> dict[str, Any] | None:
    """Return the version, or the kinds of a group; None for another path."""
    if path == "/version":
        return {"major": "1", "minor": "33", "gitVersion": "v1.33.0-fake"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        versions = dict.fromkeys((one.group, one.version) for one in RESOURCES if one.group and one.group in installed)
        groups = [_group(group, [version for of, version in versions if of == group]) for group, _ in versions]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
    match = re.fullmatch(r"/apis/([^/]+)/([^/]+)|/api/(v1)", path)
    if match is None:
        return None
    group, version = match[1] or "", match[2] or "v1"
    found = [one for one in RESOURCES if (one.group, one.version) == (group, version) and group in installed]
    if not found:
        raise Refused(404, "the server could not find the requested resource")
    kinds = [{"name": one.plural, "kind": one.kind, "namespaced": one.namespaced, "verbs": VERBS} for one in found]
    group_version = found[0].api_version
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group_version, "resources": kinds}


def _group(name: str, versions: list[str]) -> dict[str, Any]:
    found = [{"groupVersion": f"{name}/{one}", "version": one} for one in versions]
    return {"name": name, "versions": found, "preferredVersion": found[-1]}
