"""One namespace of a cluster, through Kubernetes' own client and the kubeconfig, a pod's own account within one."""

import contextlib
import http.client
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import kubernetes
import yaml
from kubernetes.client.exceptions import ApiException
from kubernetes.stream import portforward
from urllib3.exceptions import HTTPError, MaxRetryError, SSLError
from websocket import WebSocketException

from components.contract.errors import TransientError, UserError, one_line

Object = dict[str, Any]
MANAGER = "qdflash"
APPLY = "application/apply-patch+yaml"
REQUEST_SECONDS = 60


class Namespace:
    """Objects of one namespace.

    Methods raise :class:`UserError` for what the server refuses, its own words in it, and :class:`TransientError`
    when it does not answer.
    """

    def __init__(self, name: str) -> None:
        load_kubeconfig()
        self.name = name
        self._client = kubernetes.client.ApiClient()
        self.plural = cache(self._plural)

    def version(self) -> str:
        """Return the server's version."""
        return str(self._call("GET", "/version")["gitVersion"])

    def get(self, api_version: str, kind: str, name: str) -> Object | None:
        """Return an object, or None when there is none."""
        return self._call("GET", self.path(api_version, kind, name), absent=None)

    def pods(self, labels: str) -> list[Object]:
        """Return the pods with these labels."""
        return list(self._call("GET", self.path("v1", "Pod"), [("labelSelector", labels)])["items"])

    def apply(self, one: Object, dry: bool = False) -> Object:
        """Apply an object on the server, as field manager qdflash; ``dry`` only asks what would come of it.

        A field that another one manages and that would change is refused, by the manager's name.
        """
        query = [("fieldManager", MANAGER), *([("dryRun", "All")] if dry else [])]
        path = self.path(one["apiVersion"], one["kind"], one["metadata"]["name"])
        return dict(self._call("PATCH", path, query, one, APPLY))

    def create(self, one: Object) -> Object | None:
        """Create an object; return None when there is one of that name."""
        return self._call("POST", self.path(one["apiVersion"], one["kind"]), body=one, taken=None)

    def replace(self, one: Object) -> Object | None:
        """Replace an object as it was read; return None when it has changed since, or is gone."""
        path = self.path(one["apiVersion"], one["kind"], one["metadata"]["name"])
        return self._call("PUT", path, body=one, taken=None, absent=None)

    def delete(self, api_version: str, kind: str, name: str) -> bool:
        """Delete an object with what it owns; return whether there was one."""
        return self._call("DELETE", self.path(api_version, kind, name), absent=None) is not None

    def log(self, pod: str, container: str, lines: int, previous: bool = False) -> str:
        """Return the last lines of a container's log, of its run before the restart if ``previous``."""
        query = [("container", container), ("tailLines", str(lines)), ("previous", json.dumps(previous))]
        path = self.path("v1", "Pod", pod) + "/log"
        return str(self._call("GET", path, query, absent="", invalid="", answer="str"))

    def may(self, group: str, resource: str, verb: str) -> bool:
        """Say whether this account has a right in the namespace."""
        plural, _, sub = resource.partition("/")
        asked = {"group": group, "resource": plural, "subresource": sub, "verb": verb, "namespace": self.name}
        kind = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        review = kind | {"spec": {"resourceAttributes": asked}}
        path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        return bool(self._call("POST", path, body=review)["status"]["allowed"])

    def elsewhere(self, path: str) -> Any:
        """Return what is at a path outside the namespace; None when it is not there, or not for this account."""
        return self._call("GET", path, absent=None, forbidden=None)

    def path(self, api_version: str, kind: str, name: str = "") -> str:
        """Return the path of a kind, or of one of its objects."""
        root = f"/api/{api_version}" if "/" not in api_version else f"/apis/{api_version}"
        plural = self.plural(api_version, kind)
        if plural is None:
            raise UserError(f"the cluster has no {kind} of {api_version}; install what brings it")
        return f"{root}/namespaces/{self.name}/{plural}" + (f"/{name}" if name else "")

    @contextlib.contextmanager
    def connection(self, pod: str, port: int) -> Iterator[http.client.HTTPConnection]:
        """Open an HTTP connection to a pod's port, through the API server."""
        core = kubernetes.client.CoreV1Api(self._client)
        try:
            tunnel = portforward(core.connect_get_namespaced_pod_portforward, pod, self.name, ports=str(port))
        except (ApiException, WebSocketException, OSError) as error:
            raise TransientError(
                f"pod {pod}: port {port} is not forwarded ({' '.join(str(error).split())})"
            ) from error
        made = http.client.HTTPConnection(pod, port)
        made.sock = tunnel.socket(port)
        made.sock.settimeout(REQUEST_SECONDS * 10)
        try:
            yield made
        finally:
            made.close()

    def _plural(self, api_version: str, kind: str) -> str | None:
        root = f"/api/{api_version}" if "/" not in api_version else f"/apis/{api_version}"
        found = self._call("GET", root, absent={"resources": []})["resources"]
        return next((one["name"] for one in found if one["kind"] == kind and "/" not in one["name"]), None)

    def _call(
        self,
        method: str,
        path: str,
        query: list[tuple[str, str]] | None = None,
        body: Any = None,
        content: str = "application/json",
        answer: str = "object",
        **instead: Any,
    ) -> Any:
        """Do one request; ``instead`` gives what to return for some refusals: absent, taken, invalid, forbidden."""
        host = self._client.configuration.host
        try:
            found = self._client.call_api(
                path,
                method,
                query_params=query or [],
                header_params={"Content-Type": content, "Accept": "application/json"},
                body=body,
                response_type=answer,
                auth_settings=["BearerToken"],
                _request_timeout=REQUEST_SECONDS,
            )[0]
        except ApiException as error:
            known = {404: "absent", 409: "taken", 400: "invalid", 403: "forbidden"}.get(error.status, "")
            if known in instead:
                return instead[known]
            said = _said(error)
            if error.status in (0, 429, 500, 502, 503, 504):
                raise TransientError(f"Kubernetes: {error.status} {said}; try again") from error
            raise UserError(f"Kubernetes: {error.status} {said}") from error
        except HTTPError as error:
            if isinstance(error, MaxRetryError) and isinstance(error.reason, SSLError):
                raise UserError(f"Kubernetes at {host}: {error.reason}; look at the kubeconfig") from error
            raise TransientError(f"Kubernetes at {host}: no answer ({error}); look at the kubeconfig") from error
        if answer == "object" and not isinstance(found, dict):
            raise UserError(f"Kubernetes at {host}: no Kubernetes API answers there; look at the kubeconfig")
        return found


def load_kubeconfig() -> None:
    """Let Kubernetes' client be configured; raises :class:`UserError` when nothing says how."""
    try:
        with contextlib.redirect_stdout(None):
            kubernetes.config.load_config()
    except (kubernetes.config.ConfigException, yaml.YAMLError, TypeError) as error:
        raise UserError(
            f"kubeconfig: none that works ({one_line(error, 200)}); set KUBECONFIG, or see kubectl config"
        ) from error


def _said(error: ApiException) -> str:
    """Return the message of a Status body, or what there is."""
    try:
        return " ".join(str(json.loads(error.body)["message"]).split())[:400]
    except (ValueError, KeyError, TypeError):
        return " ".join(str(error.body or error.reason or error).split())[:300]
