"""Submission and what follows it, by kfp's own client against a declared fake of its server."""

import json
import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from typer.testing import CliRunner

from components.contract.errors import StageError, TransientError, UserError
from components.store.backend import Store
from pipelines import seaweed, submit
from pipelines.cli import app
from tests import loopback
from tests.pipelines import fake_kubeflow
from tests.pipelines.fake_kubeflow import NAMESPACE, TOKEN, State
from tests.pipelines.planning import IMAGES, commit_all, plan_of


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[State]:
    """The fake server, named in the environment as a user would name a real one."""
    with fake_kubeflow.serving() as (address, state):
        user = {"name": "x", "user": {"token": TOKEN}}
        context = {"name": "x", "context": {"cluster": "x", "user": "x"}}
        config = {"apiVersion": "v1", "kind": "Config", "current-context": "x", "users": [user], "contexts": [context]}
        config["clusters"] = [{"name": "x", "cluster": {"server": address}}]
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
        for module in ("kubernetes.config", "kubernetes.config.kube_config"):  # KUBECONFIG, read when it was imported
            monkeypatch.setattr(f"{module}.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "kubeconfig"))
        monkeypatch.setenv("QDFLASH_KFP_HOST", address)
        monkeypatch.setenv("QDFLASH_KFP_TOKEN", TOKEN)
        monkeypatch.setattr(submit, "POLL_SECONDS", 0.02)
        yield state


@pytest.fixture
def store(s3_store: Store, tmp_path: Path) -> Store:
    return Store(f"s3://{seaweed.BUCKET}/{tmp_path.name}")


def called(*words: str) -> str:
    done = CliRunner().invoke(app, words)
    if isinstance(done.exception, StageError):
        raise done.exception
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def submitted(store: Store, *words: str) -> str:
    images = [word for one in IMAGES for word in ("--set", one)]
    return called("submit", "tiny", "--store", store.url, *images, *words).strip()


def run(state: State, run_id: str, now: str, *tasks: tuple[str, str], error: str = "") -> None:
    details = [{"display_name": name, "state": one} for name, one in tasks]
    changes: dict[str, Any] = {"state": now, "run_details": {"task_details": details}}
    state.runs[run_id] |= changes | ({"error": {"message": error}} if error else {})


def pod(
    run_id: str, stage: str, code: int | None, log: str = "", phase: str = "Failed", at: int = 0
) -> dict[str, Any]:
    ended = {"terminated": {"exitCode": code, "reason": "x"}} if code is not None else {"waiting": {"reason": "x"}}
    status = {"name": "main", "state": ended, "ready": False, "restartCount": 0, "image": "x", "imageID": "x"}
    labels = {"pipeline/runid": run_id, "app.kubernetes.io/part-of": "qdflash", "app.kubernetes.io/component": stage}
    metadata = {"name": f"{stage}-{at}", "labels": labels, "creationTimestamp": f"2026-01-01T00:00:{at:02}Z"}
    return {"metadata": metadata, "status": {"phase": phase, "containerStatuses": [status]}, "log": log}


def test_a_submitted_run_is_the_plan_with_its_files_in_the_store(cluster: State, store: Store, tmp_path: Path) -> None:
    commit_all(plan_of(store), store, tmp_path / "x", {"teacher"})
    run_id = submitted(store, "--experiment", "trial")
    sent = cluster.runs[run_id]
    (experiment,) = cluster.experiments.values()
    assert (experiment["display_name"], experiment["namespace"]) == ("trial", NAMESPACE)
    assert (sent["experiment_id"], sent["service_account"]) == (experiment["experiment_id"], "qdflash-stage")
    spec = sent["pipeline_spec"].get("pipeline_spec", sent["pipeline_spec"])
    executors = spec["deploymentSpec"]["executors"]
    commands = [one["container"]["args"] for one in executors.values() if "container" in one]
    argv = {tuple(args[: args.index("--executor-output")]) for args in commands}
    plan = plan_of(store)
    assert argv == {task.argv for task in plan.tasks if task.state == "run"}
    assert sum("importer" in one for one in executors.values()) == 1
    for task in plan.tasks:
        for path, key in task.files_to_upload:
            assert store.read(key) == path.read_bytes()
    assert submitted(store, "--experiment", "trial") != run_id
    assert len(cluster.experiments) == 1


@pytest.mark.slow
def test_selection_and_force_work_as_they_do_here(cluster: State, store: Store, tmp_path: Path) -> None:
    commit_all(plan_of(store), store, tmp_path / "x")
    before = {task.name: task.digest for task in plan_of(store).tasks}
    run_id = submitted(store, "--force", "gptq", "--only", "gptq")
    spec = cluster.runs[run_id]["pipeline_spec"]
    executors = spec.get("pipeline_spec", spec)["deploymentSpec"]["executors"]
    (ran,) = [one["container"]["args"] for one in executors.values() if "container" in one]
    assert ran[1] == "components.gptq"
    assert "--salt" in ran
    after = {task.name: task.digest for task in plan_of(store).tasks}
    assert after["gptq"] != before["gptq"]
    with pytest.raises(UserError, match="bundle: blocked: gptq is not committed"):
        submitted(store, "--only", "bundle")
    assert len(cluster.runs) == 1
    run_id = submitted(store, "--unforce", "gptq")  # it is there again, and all below it; deploy runs every time
    spec = cluster.runs[run_id]["pipeline_spec"]
    executors = spec.get("pipeline_spec", spec)["deploymentSpec"]["executors"]
    assert [one["container"]["args"][1] for one in executors.values() if "container" in one] == ["components.deploy"]


@pytest.mark.slow
def test_compile_forces_too(store: Store, s3_store: Store, tmp_path: Path) -> None:
    commit_all(plan_of(store), store, tmp_path / "x")
    images = [word for one in IMAGES for word in ("--set", one)]
    words = ["compile", "tiny", "--format", "argo", "--store", store.url, *images, "-o", str(tmp_path / "w.yaml")]
    called(*words, "--force", "gptq", "--only", "gptq")
    (pod,) = (
        one["container"]["args"]
        for one in yaml.safe_load((tmp_path / "w.yaml").read_text())["spec"]["templates"]
        if "container" in one
    )
    assert pod[1] == "components.gptq"
    assert "--salt" in pod
    with pytest.raises(UserError, match="no such task or stage"):
        called(*words, "--force", "gptq", "--only", "gtpq")


def test_status_and_logs(cluster: State, store: Store) -> None:
    run_id = submitted(store)
    run(cluster, run_id, "FAILED", ("teacher", "SUCCEEDED"), ("qad", "FAILED"), error="qad failed")
    said = called("status", run_id)
    assert "FAILED qad failed" in said
    assert "  teacher: SUCCEEDED\n" in said
    assert json.loads(called("status", run_id, "--json"))["tasks"] == {"teacher": "SUCCEEDED", "qad": "FAILED"}
    cluster.pods = [
        pod(run_id, "qad", 2, "second\n", at=9),
        pod(run_id, "model", 0, "first\n"),
        pod("other", "qad", 0),
    ]
    assert called("logs", run_id) == "model | first\nqad | second\n"
    assert called("logs", run_id, "qad") == "qad | second\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codes", "expected", "retried"),
    [
        ([0, 2], 2, 0),
        ([3, 75], 3, 0),
        ([75], 0, 1),
        ([137], 0, 1),
        ([None], 0, 1),  # the pod is lost: no container of it says how it ended
        ([], 1, 0),
    ],
)
def test_wait_retries_what_preemption_ended_and_nothing_else(
    codes: list[int | None], expected: int, retried: int, cluster: State, store: Store
) -> None:
    run_id = submitted(store)
    run(cluster, run_id, "FAILED", ("qad", "FAILED"))
    cluster.pods = [pod(run_id, "qad", code, at=at) for at, code in enumerate(codes)]
    cluster.unavailable = 2
    done = CliRunner().invoke(app, ["wait", run_id, "--retries", "3"])
    assert (done.exit_code, len(cluster.retries)) == (expected, retried), done.output
    assert done.stdout.count("try again") == 1  # twice away, once said


def test_retries_end(cluster: State, store: Store) -> None:
    run_id = submitted(store)
    run(cluster, run_id, "FAILED", ("qad", "FAILED"))
    cluster.pods, cluster.after_retry = [pod(run_id, "qad", 75)], "FAILED"
    assert CliRunner().invoke(app, ["wait", run_id, "--retries", "2"]).exit_code == 75
    assert len(cluster.retries) == 2


def test_retry_and_cancel(cluster: State, store: Store) -> None:
    run_id = submitted(store)
    with pytest.raises(UserError, match="PENDING cannot be retried"):
        called("retry", run_id)
    called("cancel", run_id)
    assert cluster.runs[run_id]["state"] == "CANCELED"
    with pytest.raises(UserError, match="CANCELED cannot be terminated"):
        called("cancel", run_id)
    called("retry", run_id)
    assert cluster.retries == [run_id]
    assert CliRunner().invoke(app, ["wait", run_id]).exit_code == 0


def test_refusals_are_one_line(cluster: State, store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"run gone: 404 .*run gone not found"):
        called("status", "gone")
    cluster.unavailable = 1
    with pytest.raises(TransientError, match="503"):
        called("status", "gone")
    (tmp_path / "kubeconfig").write_text("{{{")
    run_id = submitted(store)
    with pytest.raises(UserError, match="kubeconfig: none that works"):
        called("logs", run_id)
    monkeypatch.setenv("QDFLASH_KFP_TOKEN", "wrong")
    with pytest.raises(UserError, match=r"401 .*; set QDFLASH_KFP_TOKEN"):
        submitted(store)
    monkeypatch.setenv("QDFLASH_KFP_HOST", "http://127.0.0.1:9")
    with pytest.raises(TransientError, match="--host"):
        called("status", "x")


def test_a_server_with_a_certificate_of_a_company_s_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is found as kfp finds it, too, when no host is given."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a server")])
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now - timedelta(1), now + timedelta(1))
    made = made.add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
    certificate, secret = tmp_path / "certificate.pem", tmp_path / "key.pem"
    certificate.write_bytes(made.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    secret.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificate, secret)
    with fake_kubeflow.serving(tls) as (address, _):
        monkeypatch.setenv("KF_PIPELINES_ENDPOINT", address)
        monkeypatch.setenv("QDFLASH_KFP_TOKEN", TOKEN)
        monkeypatch.delenv("SSL_CERT_FILE", raising=False)
        with pytest.raises(UserError, match=r"certificate verify failed.*SSL_CERT_FILE"):
            called("status", "gone")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        with pytest.raises(UserError, match=r"404 .*run gone not found"):
            called("status", "gone")


def test_the_fake_refuses_what_the_client_could_not_send() -> None:
    state = State()

    def asked(body: Any, path: str = "runs") -> Any:
        return fake_kubeflow.answer(state, "POST", f"/apis/v2beta1/{path}", {}, body)

    made = asked({"display_name": "x", "namespace": NAMESPACE}, "experiments")
    for body, fault in (
        ({"experiment_id": made["experiment_id"], "pipelineSpec": {}}, "no field pipelineSpec"),
        ({"experiment_id": made["experiment_id"], "service_account": 7}, "7 is no str"),
        ({"experiment_id": made["experiment_id"], "runtime_config": {"params": {}}}, "no field params"),
        ({"experiment_id": "unknown"}, "unknown not found"),
        ({"experiment_id": made["experiment_id"]}, "invalid pipeline spec"),
        ({"experiment_id": made["experiment_id"], "pipeline_spec": {"rood": {}}}, "invalid pipeline spec"),
    ):
        with pytest.raises(fake_kubeflow.Refused, match=fault):
            asked(body)


@pytest.mark.parametrize("verb", ["status", "retry", "cancel", "wait"])
def test_a_sign_in_page_is_no_answer(verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a proxy before Kubeflow answers with 200 once a token has expired."""

    class SignIn(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(b"<html>Sign in</html>")

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    with loopback.serving(SignIn) as (_, address):
        monkeypatch.setenv("QDFLASH_KFP_HOST", address)
        with pytest.raises(UserError, match=r"no Kubeflow Pipelines API answers there; .* QDFLASH_KFP_TOKEN"):
            called(verb, "5f0c")


def test_a_server_that_says_nothing_is_away(cluster: State, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    run_id = submitted(store)
    monkeypatch.setattr(submit, "REQUEST_SECONDS", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("QDFLASH_KFP_HOST", f"http://127.0.0.1:{silent.getsockname()[1]}")
        for verb in ("status", "cancel"):
            with pytest.raises(TransientError, match="no answer"):
                called(verb, run_id)
