"""The HTTP side of the fake: paths, tokens, rights, watches and logs."""

import json
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kubernetes

from tests import loopback
from tests.kubernetes_api import forwarding
from tests.kubernetes_api.discovery import REVIEW, Rights, allows, discovered, reviewed
from tests.kubernetes_api.refusal import Refused
from tests.kubernetes_api.resources import BY_KIND, BY_PATH, Resource
from tests.kubernetes_api.selectors import selected
from tests.kubernetes_api.state import APPLY, NAMESPACE, State

ADMIN = "an-admin"
VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>[^/]+)"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/))?/(?P<plural>[^/]+)(?:/(?P<name>[^/]+)(?:/(?P<sub>[^/]+))?)?"
)
TRUE = ("1", "true", "True")
NO_STREAM_SECONDS = 3600.0


class Api:
    """A running fake: its address and its state."""

    def __init__(self, url: str, state: State) -> None:
        self.url, self.state = url, state

    def client(self, token: str = ADMIN) -> kubernetes.client.ApiClient:
        """Return Kubernetes' own client for this server."""
        configuration = kubernetes.client.Configuration(host=self.url)
        configuration.api_key = {"authorization": f"Bearer {token}"}
        configuration.retries = False
        return kubernetes.client.ApiClient(configuration)

    def add(self, one: dict[str, Any]) -> dict[str, Any]:
        """Create an object as the cluster's own controllers would."""
        resource = BY_KIND[one["apiVersion"], one["kind"]]
        namespace = one["metadata"].get("namespace", NAMESPACE) if resource.namespaced else ""
        return self.state.create(resource, namespace, one, "cluster")

    def kubeconfig(self, token: str = ADMIN) -> str:
        """Return a kubeconfig file's text for this server."""
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "fake",
                "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake", "namespace": NAMESPACE}}],
                "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
                "users": [{"name": "fake", "user": {"token": token}}],
            }
        )


@contextmanager
def serving() -> Iterator[Api]:
    """Serve on a free port of loopback, with one namespace and a token that may do everything."""
    state = State(rights={ADMIN: ("admin", None)})
    with loopback.serving(type("Bound", (Handler,), {"state": state})) as (_, url):
        api = Api(url, state)
        api.add({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        yield api


class Handler(BaseHTTPRequestHandler):
    """One request; streams are chunked, as the client reads them line by line."""

    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet: the client's delayed acknowledgement costs 40 ms otherwise
    disable_nagle_algorithm = True
    state: State

    def _do(self) -> None:
        try:
            try:
                self._answer()
            except Refused as refused:
                self._send(refused.code, refused.status())
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _do

    def _answer(self) -> None:
        url = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        length = int(self.headers.get("Content-Length") or 0)
        data = self.rfile.read(length)
        with self.state.changed:
            if self.state.unavailable:
                self.state.unavailable -= 1
                raise Refused(503, "the server is currently unable to handle the request")
        account, rights = self._who()
        try:
            body = json.loads(data) if data else None
        except ValueError as error:
            raise Refused(400, f"the body is no JSON: {error}") from error
        if found := discovered(url.path, self.state.installed):
            return self._send(200, found)
        if url.path == REVIEW:
            return self._send(201, reviewed(body, rights))
        match = PATH.fullmatch(url.path)
        resource = BY_PATH.get((match["group"] or "", match["version"], match["plural"])) if match else None
        if match is None or resource is None or resource.group not in self.state.installed:
            raise Refused(404, "the server could not find the requested resource")
        namespace, name, sub = match["namespace"] or "", match["name"], match["sub"]
        verb = VERBS.get(self.command) or ("get" if name else "watch" if query.get("watch") in TRUE else "list")
        self._demand(account, rights, resource, sub, verb, namespace, name or "")
        if sub in ("log", "portforward") and resource.kind == "Pod":
            return self._log(namespace, name, query) if sub == "log" else self._forward(namespace, name, query)
        if sub not in (None, "status") or (sub == "status" and not resource.status):
            raise Refused(404, "the server could not find the requested resource")
        if verb == "watch":
            return self._watch(resource, namespace, query)
        if self.headers.get("Content-Type", "").startswith(APPLY):
            if not query.get("fieldManager"):
                raise Refused(400, "PatchOptions fieldManager: Required value: is required for apply patch")
            if not any(key == (resource, namespace, name) for key in list(self.state.objects)):
                self._demand(account, rights, resource, sub, "create", namespace, name or "")
        query.setdefault("fieldManager", (self.headers.get("User-Agent") or "unknown").partition("/")[0])
        return self._send(
            201 if verb == "create" else 200, self._act(verb, resource, namespace, name, sub, query, body)
        )

    def _act(
        self, verb: str, resource: Resource, namespace: str, name: str | None, sub: str | None, query: Any, body: Any
    ) -> Any:
        state, dry, manager = self.state, "dryRun" in query, query["fieldManager"]
        match verb:
            case "list":
                with state.changed:
                    found = state.list(
                        resource, namespace, query.get("labelSelector", ""), query.get("fieldSelector", "")
                    )
                    metadata = {"resourceVersion": str(state.version)}
                kind = f"{resource.kind}List"
                return {"kind": kind, "apiVersion": resource.api_version, "metadata": metadata, "items": found}
            case "get":
                return state.get(resource, namespace, name or "")
            case "create" if name is None:
                return state.create(resource, namespace, body, manager, dry)
            case "update" if name:
                if isinstance(body, dict) and body.get("metadata", {}).get("name") != name:
                    raise Refused(400, "the name of the object does not match the name on the URL")
                return state.replace(resource, namespace, body, manager, sub == "status", dry)
            case "patch" if name:
                how = self.headers["Content-Type"].partition(";")[0]
                query = query | ({"status": "yes"} if sub else {})
                return state.patch(resource, namespace, name, body, how, query)
            case "delete" if name:
                return state.delete(resource, namespace, name, (body or {}) | query)
        raise Refused(405, "the server does not allow this method on the requested resource")

    def _who(self) -> tuple[str, Rights]:
        token = re.sub("^Bearer ", "", self.headers.get("Authorization") or "", flags=re.IGNORECASE)
        if token not in self.state.rights:
            raise Refused(401, "Unauthorized")
        return self.state.rights[token]

    def _demand(
        self, account: str, rights: Rights, resource: Resource, sub: str | None, verb: str, namespace: str, name: str
    ) -> None:
        plural = resource.plural + (f"/{sub}" if sub else "")
        if namespace == NAMESPACE:
            self.state.used.add((resource.group, plural, verb))
        if allows(rights if namespace or rights is None else set(), resource.group, plural, verb):
            return
        user = f"system:serviceaccount:{NAMESPACE}:{account}"
        where = f'in the namespace "{namespace}"' if namespace else "at the cluster scope"
        raise Refused(
            403,
            f'{resource.named} "{name}" is forbidden: User "{user}" cannot {verb} '
            f'resource "{plural}" in API group "{resource.group}" {where}',
        )

    def _watch(self, resource: Resource, namespace: str, query: dict[str, str]) -> None:
        labels, fields, state = query.get("labelSelector", ""), query.get("fieldSelector", ""), self.state
        end = time.monotonic() + float(query.get("timeoutSeconds", NO_STREAM_SECONDS))
        selected({"metadata": {}}, labels, fields)
        self._begin("application/json")
        with state.changed:
            since = int(query.get("resourceVersion") or 0)
            if since == 0:
                since = state.version
                for one in state.list(resource, namespace, labels, fields):
                    self._event("ADDED", one)
        while time.monotonic() < end:
            with state.changed:
                if since < state.forgotten:
                    gone = Refused(410, f"too old resource version: {since} ({state.version})")
                    self._event("ERROR", gone.status())
                    break
                found = [one for one in state.events if one.version > since]
                if not found:
                    state.changed.wait(min(0.5, max(0.0, end - time.monotonic())))
                    continue
                since = found[-1].version
            for one in found:
                if one.key[0] != resource or namespace not in ("", one.key[1]):
                    continue
                was, now = (bool(side) and selected(side, labels, fields) for side in (one.before, one.after))
                if now:
                    self._event("MODIFIED" if was else "ADDED", one.after)
                elif was:
                    self._event("DELETED", one.after or one.before)
        self._chunk(b"")

    def _log(self, namespace: str, name: str, query: dict[str, str]) -> None:
        state, previous = self.state, query.get("previous") in TRUE
        pod = state.get(BY_KIND["v1", "Pod"], namespace, name)
        spec = pod["spec"]
        names = [one["name"] for one in (*spec.get("initContainers", ()), *spec["containers"])]
        container = query.get("container") or (names[0] if len(names) == 1 else None)
        if container is None:
            raise Refused(400, f"a container name must be specified for pod {name}, choose one of: {names}")
        if container not in names:
            raise Refused(400, f"container {container} is not valid for pod {name}")
        key = (namespace, name, container, previous)
        if key not in state.logs:
            what = "previous terminated container" if previous else "container"
            why = "not found" if previous else "is waiting to start: ContainerCreating"
            raise Refused(400, f'{what} "{container}" in pod "{name}" {why}')
        text = state.logs[key]
        told = len(text)
        if "tailLines" in query:
            text = "".join(text.splitlines(keepends=True)[-int(query["tailLines"]) :])
        if query.get("follow") not in TRUE:
            return self._send(200, text)
        self._begin("text/plain")
        self._chunk(text.encode(), last=False)
        while True:
            with state.changed:
                more, running = state.logs[key][told:], _runs(state, namespace, name, container)
                if not more and running:
                    state.changed.wait(0.5)
                    continue
            if not more:
                return self._chunk(b"")
            told += len(more)
            self._chunk(more.encode(), last=False)

    def _forward(self, namespace: str, name: str, query: dict[str, str]) -> None:
        self.state.get(BY_KIND["v1", "Pod"], namespace, name)
        if name not in self.state.forwards:
            raise Refused(400, f"pod {name} is not running")
        forwarding.forward(self, self.state.forwards[name], int(query["ports"]))

    def _event(self, kind: str, one: Any) -> None:
        self._chunk(json.dumps({"type": kind, "object": one}).encode() + b"\n")

    def _begin(self, content_type: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()

    def _chunk(self, data: bytes, last: bool = True) -> None:
        """Send a chunk; an empty one ends the stream unless ``last`` is false."""
        if data or last:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

    def _send(self, code: int, document: Any) -> None:
        data = document.encode() if isinstance(document, str) else json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if isinstance(document, str) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def _runs(state: State, namespace: str, name: str, container: str) -> bool:
    pod = state.objects.get((BY_KIND["v1", "Pod"], namespace, name))
    if pod is None or pod.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        return False
    found = [one for one in pod.get("status", {}).get("containerStatuses", ()) if one["name"] == container]
    return not any("terminated" in one.get("state", {}) for one in found)
