"""Runs on a Kubeflow Pipelines server: submit, look at, wait for, retry, cancel; logs come from their pods.

The server is the one that ``--host`` names, else kfp's own settings (``KF_PIPELINES_ENDPOINT``, the kubeconfig, a
pod's own cluster). A token is read from ``QDFLASH_KFP_TOKEN``, a CA bundle from ``SSL_CERT_FILE``.
"""

import contextlib
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes
from kfp.client import Client
from kfp_server_api import ApiException
from kubernetes.client.exceptions import ApiException as KubernetesException
from urllib3.exceptions import HTTPError, MaxRetryError, SSLError

from components.contract.errors import BUG, DONE, TRANSIENT, TransientError, UserError
from pipelines.deployment.api import load_kubeconfig
from pipelines.kubeflow import compile_plan
from pipelines.plan import Plan, upload_files
from pipelines.trainjob.spec import ACCOUNT, STAGE_ACCOUNT, launches

POLL_SECONDS = 15.0
REQUEST_SECONDS = 60
"""How long an answer may take. kfp's own calls wait for ever and it has no retry, so its generated client is asked,
which heeds whole numbers alone.
"""
_ENDED = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")


class Server:
    """A Kubeflow Pipelines server, and the pods of its runs.

    Every method raises :class:`UserError` for what the server refuses and :class:`TransientError` when it is away.
    """

    def __init__(self, host: str | None, namespace: str) -> None:
        self._namespace = namespace
        with warnings.catch_warnings(), _one_line("Kubeflow"), contextlib.redirect_stdout(None):
            warnings.simplefilter("ignore")
            self._client = Client(
                host=host,
                namespace=namespace,
                existing_token=os.environ.get("QDFLASH_KFP_TOKEN"),
                ssl_ca_cert=os.environ.get("SSL_CERT_FILE"),
            )

    def submit(self, plan: Plan, experiment: str) -> str:
        """Put the plan's files into the store, start a run, and return its ID."""
        upload_files(plan)
        with tempfile.TemporaryDirectory() as folder, _one_line("submit"), contextlib.redirect_stdout(None):
            path = Path(folder) / "pipeline.yaml"
            compile_plan(plan, path)
            made = self._client.create_run_from_pipeline_package(
                str(path),
                run_name=f"{plan.recipe} {time.strftime('%Y-%m-%d %H:%M:%S')}",
                experiment_name=experiment,
                namespace=self._namespace,
                service_account=ACCOUNT if launches(plan) else STAGE_ACCOUNT,
            )
        _demand(made.run_id is not None, "submit")
        return str(made.run_id)

    def run(self, run_id: str) -> dict[str, Any]:
        """Return a run: ``name``, ``state``, ``error``, and the state of each task by name."""
        with _one_line(f"run {run_id}"):
            found = self._client._run_api.run_service_get_run(run_id, _request_timeout=REQUEST_SECONDS)
        _demand(getattr(found, "run_id", None) == run_id, f"run {run_id}")
        details = found.run_details.task_details if found.run_details else None
        tasks = {one.display_name: str(one.state) for one in details or ()}
        error = found.error.message if found.error else ""
        return {"name": found.display_name, "state": str(found.state), "error": error, "tasks": tasks}

    def retry(self, run_id: str) -> None:
        """Start the failed tasks of a run again; each resumes."""
        with _one_line(f"run {run_id}"):
            answer = self._client._run_api.run_service_retry_run(run_id, _request_timeout=REQUEST_SECONDS)
        _demand(isinstance(answer, dict), f"run {run_id}")

    def cancel(self, run_id: str) -> None:
        """End a run; what its tasks have put into the store stays."""
        with _one_line(f"run {run_id}"):
            answer = self._client._run_api.run_service_terminate_run(run_id, _request_timeout=REQUEST_SECONDS)
        _demand(isinstance(answer, dict), f"run {run_id}")

    def wait(self, run_id: str, retries: int, say: Callable[[str], None]) -> int:
        """Block until the run has ended, however long it takes, and return an exit code.

        Kubeflow's own retries do not count pods that were preempted. So a run that failed only by exit code 75, by a
        signal or by lost pods is retried here, up to ``retries`` times.
        """
        told: str | None = ""  # None: that the server is away
        while True:
            try:
                found = self.run(run_id)
                state = f"{found['state']}: " + ", ".join(f"{name} {one}" for name, one in found["tasks"].items())
                if state != told:
                    say(state)
                    told = state
                if found["state"] in _ENDED:
                    code = DONE if found["state"] == "SUCCEEDED" else self._code(run_id, found["state"])
                    if code != TRANSIENT or found["state"] == "CANCELED" or not retries:
                        return code
                    retries -= 1
                    say(f"retrying; {retries} more to go")
                    self.retry(run_id)
            except TransientError as error:
                if told is not None:
                    say(str(error))
                    told = None
            time.sleep(POLL_SECONDS)

    def logs(self, run_id: str, task: str | None) -> Iterator[tuple[str, str]]:
        """Yield (stage, log) of a run's pods, oldest first; of one task's stage when named."""
        for pod in self._pods(run_id):
            stage = pod.metadata.labels["app.kubernetes.io/component"]
            if task in (None, stage):
                with _one_line(f"log of {pod.metadata.name}"):
                    text = self._core().read_namespaced_pod_log(pod.metadata.name, self._namespace, container="main")
                yield stage, text

    def _code(self, run_id: str, state: str) -> int:
        """Return the exit code of the first stage that failed for good; 75 when all that failed may be tried again."""
        codes = [code for pod in self._pods(run_id) if (code := _exit_code(pod)) != DONE]
        final = [code for code in codes if code != TRANSIENT]
        return final[0] if final else (TRANSIENT if codes or state == "CANCELED" else BUG)

    def _pods(self, run_id: str) -> list[Any]:
        """Return the run's pods that run stages."""
        selector = f"pipeline/runid={run_id},app.kubernetes.io/part-of=qdflash"
        with _one_line(f"pods of run {run_id}"):
            found = (
                self._core()
                .list_namespaced_pod(self._namespace, label_selector=selector, _request_timeout=REQUEST_SECONDS)
                .items
            )
        return sorted(found, key=lambda pod: pod.metadata.creation_timestamp)

    def _core(self) -> kubernetes.client.CoreV1Api:
        load_kubeconfig()  # logs and exit codes are read from the cluster's pods
        return kubernetes.client.CoreV1Api()


def _exit_code(pod: Any) -> int:
    """Return how a pod's stage ended: 75 also for a signal and for a pod that was lost."""
    ended = [one.state.terminated for one in pod.status.container_statuses or () if one.name == "main"]
    if not ended or ended[0] is None:
        return TRANSIENT if pod.status.phase == "Failed" else DONE
    code = int(ended[0].exit_code)
    return TRANSIENT if code > 128 else code


def _demand(is_answer: bool, what: str) -> None:
    """Refuse what a proxy's page makes of kfp's models: a sign-in answers 200 once a token has expired."""
    if not is_answer:
        raise UserError(f"{what}: no Kubeflow Pipelines API answers there; look at --host, set QDFLASH_KFP_TOKEN")


@contextlib.contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turn what a server refuses into one line."""
    try:
        yield
    except (ApiException, KubernetesException) as error:
        said = " ".join(str(error.body or error.reason or error).split())[:300]
        if error.status in (0, 429, 500, 502, 503, 504):
            raise TransientError(f"{what}: {error.status} {said}; try again") from error
        hint = "; set QDFLASH_KFP_TOKEN" if error.status in (401, 403) else ""
        raise UserError(f"{what}: {error.status} {said}{hint}") from error
    except HTTPError as error:
        if isinstance(error, MaxRetryError) and isinstance(error.reason, SSLError):
            raise UserError(f"{what}: {error.reason}; name its authority's certificates with SSL_CERT_FILE") from error
        why = error.reason if isinstance(error, MaxRetryError) else error
        raise TransientError(f"{what}: no answer ({why}); look at --host and try again") from error
