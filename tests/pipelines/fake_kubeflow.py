"""A fake of the Kubeflow Pipelines API, and of the part of the Kubernetes API that reads a run's pods.

It speaks their real paths over HTTP, so kfp's and Kubernetes' own clients talk to it unmodified. Each request body is
held against the client's own OpenAPI model, field by field, and a pipeline against the IR's own message; what does not
fit is refused as the server would. It runs nothing: a test says how a run and its pods are.
"""

import json
import re
import ssl
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

import kfp_server_api
from google.protobuf import json_format
from kfp.pipeline_spec import pipeline_spec_pb2

from tests import loopback

TOKEN = "a-token"
NAMESPACE = "qdflash"
ENDED = ("SUCCEEDED", "FAILED", "CANCELED")


class Refused(Exception):
    """An answer that is an error: (status, message)."""


@dataclass
class State:
    """What the server knows; tests read and write it."""

    experiments: dict[str, Any] = field(default_factory=dict)
    runs: dict[str, Any] = field(default_factory=dict)
    pods: list[dict[str, Any]] = field(default_factory=list)
    retries: list[str] = field(default_factory=list)
    after_retry: str = "SUCCEEDED"
    unavailable: int = 0


def demand_model(body: Any, kind: str) -> None:
    """Refuse a body with a field that the client's model ``kind`` does not have, or of another type."""
    if kind.startswith("list["):
        for one in body:
            demand_model(one, kind[5:-1])
    elif kind in ("str", "int", "object", "datetime") or kind.startswith("dict("):
        if not isinstance(body, {"str": str, "datetime": str, "int": int}.get(kind, dict)):
            raise Refused(400, f"{body!r} is no {kind}")
    else:
        model = getattr(kfp_server_api, kind)
        names = {model.attribute_map[name]: of for name, of in model.openapi_types.items()}
        for name, value in body.items():
            if name not in names:
                raise Refused(400, f"{kind} has no field {name}")
            demand_model(value, names[name])


def answer(state: State, method: str, path: str, query: dict[str, str], body: Any) -> Any:
    """Do what a request asks for and return the answer's body."""
    if path.startswith("/api/v1/"):
        return _pods(state, path, query)
    match method, path.removeprefix("/apis/v2beta1/").split("/"):
        case "GET", ["experiments"]:
            (wanted,) = json.loads(query["filter"])["predicates"]
            if (wanted["operation"], wanted["key"]) != (1, "display_name"):  # 1 is EQUALS
                raise Refused(400, f"filter {wanted}")
            found = [one for one in state.experiments.values() if one["display_name"] == wanted["stringValue"]]
            return {"experiments": [one for one in found if one["namespace"] == query.get("namespace")]}
        case "POST", ["experiments"]:
            demand_model(body, "V2beta1Experiment")
            if not body.get("namespace"):
                raise Refused(400, "Invalid input error: in multi-user mode an experiment has a namespace")
            return _kept(state.experiments, "experiment_id", body)
        case "POST", ["runs"]:
            demand_model(body, "V2beta1Run")
            if body.get("experiment_id") not in state.experiments:
                raise Refused(404, f"experiment {body.get('experiment_id')} not found")
            try:
                spec = body["pipeline_spec"]
                json_format.ParseDict(spec.get("pipeline_spec", spec), pipeline_spec_pb2.PipelineSpec())
            except (KeyError, json_format.ParseError) as error:
                raise Refused(400, f"invalid pipeline spec: {error}") from error
            return _kept(state.runs, "run_id", body | {"state": "PENDING"})
        case "GET", ["runs", run_id]:
            return _run(state, run_id)
        case "POST", ["runs", action]:
            run_id, _, verb = action.partition(":")
            return _act(state, _run(state, run_id), verb)
    raise Refused(404, f"{method} {path}: no such path")


def _act(state: State, run: Any, verb: str) -> dict[str, Any]:
    if verb == "retry" and run["state"] not in ("FAILED", "CANCELED"):
        raise Refused(400, f"a run that is {run['state']} cannot be retried")
    if verb == "terminate" and run["state"] in ENDED:
        raise Refused(400, f"a run that is {run['state']} cannot be terminated")
    if verb == "retry":
        state.retries.append(run["run_id"])
        run["state"] = state.after_retry
    elif verb == "terminate":
        run["state"] = "CANCELED"
    else:
        raise Refused(404, verb)
    return {}


def _pods(state: State, path: str, query: dict[str, str]) -> Any:
    match = re.fullmatch(r"/api/v1/namespaces/([^/]+)/pods(?:/([^/]+)/log)?", path)
    if match is None or match[1] != NAMESPACE:
        raise Refused(403, f"{path}: not allowed")
    if match[2]:
        pod = next((one for one in state.pods if one["metadata"]["name"] == match[2]), None)
        if pod is None or query.get("container") != "main":
            raise Refused(404, f"pods {match[2]} not found")
        return pod["log"]
    wanted = dict(pair.split("=", 1) for pair in query["labelSelector"].split(","))
    found = [one for one in state.pods if wanted.items() <= one["metadata"]["labels"].items()]
    return {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": found}


def _kept(things: dict[str, Any], key: str, body: Any) -> Any:
    made = body | {key: str(uuid.uuid4())}
    things[made[key]] = made
    return made


def _run(state: State, run_id: str) -> Any:
    if run_id not in state.runs:
        raise Refused(404, f"run {run_id} not found")
    return state.runs[run_id]


@contextmanager
def serving(tls: ssl.SSLContext | None = None) -> Iterator[tuple[str, State]]:
    """Serve on a free port of loopback; yield the address and the state."""
    state = State()

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            url = urlsplit(self.path)
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            length = int(self.headers.get("Content-Length") or 0)
            status, document = 200, None
            try:
                if state.unavailable:
                    state.unavailable -= 1
                    raise Refused(503, "try later")
                if self.headers.get("Authorization", "").lower() != f"bearer {TOKEN}":
                    raise Refused(401, "Unauthenticated")
                body = json.loads(self.rfile.read(length)) if length else None
                document = answer(state, self.command, url.path, query, body)
            except Refused as refused:
                status, document = refused.args[0], {"message": refused.args[1], "code": refused.args[0]}
            data = document.encode() if isinstance(document, str) else json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if isinstance(document, str) else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _do

        def log_message(self, *_: Any) -> None:
            pass

    with loopback.serving(Handler, tls) as (_, url):
        yield url, state
