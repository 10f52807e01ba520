"""``qdflash submit`` and what follows it: runs on a Kubeflow Pipelines server."""

import time
from typing import Annotated

import typer

from pipelines.options import Forced, Only, Overrides, RecipeName, Start, StoreUrl, Unforced, planned_for_pods

app = typer.Typer()

Host = Annotated[
    str | None, typer.Option(envvar="QDFLASH_KFP_HOST", help="The server's address; else what kfp itself finds")
]
Namespace = Annotated[
    str, typer.Option(envvar="QDFLASH_KFP_NAMESPACE", help="Where the runs are; see manifests/README.md")
]
RunId = Annotated[str, typer.Argument(help="A run's ID, as submit prints it")]
Retries = Annotated[int, typer.Option(min=0, help="Times to retry a run that preemption ended")]


@app.command(epilog="Example: qdflash submit smol --host https://kubeflow.example/pipeline --store s3://bucket/runs")
def submit(
    recipe: RecipeName,
    experiment: Annotated[str, typer.Option(help="Experiment, made when it is not there")] = "qdflash",
    only: Only = None,
    start: Start = None,
    forced: Forced = None,
    unforced: Unforced = None,
    overrides: Overrides = None,
    store_url: StoreUrl = None,
    host: Host = None,
    namespace: Namespace = "qdflash",
) -> None:
    """Run a recipe on a cluster: what is committed is imported, the rest runs or resumes. Prints the run's ID."""
    from pipelines.submit import Server

    server = Server(host, namespace)
    print(server.submit(planned_for_pods(recipe, overrides, store_url, only, start, forced, unforced), experiment))


@app.command(epilog="Example: qdflash status 5f0c…")
def status(
    run_id: RunId,
    json: Annotated[bool, typer.Option("--json", help="Print as JSON")] = False,
    host: Host = None,
    namespace: Namespace = "qdflash",
) -> None:
    """Say how far a run is."""
    from pipelines.artifacts import as_json
    from pipelines.submit import Server

    found = Server(host, namespace).run(run_id)
    if json:
        print(as_json(found))
        return
    print(f"{found['name']}: {found['state']} {found['error']}".rstrip())
    for name, state in found["tasks"].items():
        print(f"  {name}: {state}")


@app.command(epilog="Example: qdflash logs 5f0c… qad")
def logs(
    run_id: RunId,
    stage: Annotated[str | None, typer.Argument(help="Only this stage's")] = None,
    host: Host = None,
    namespace: Namespace = "qdflash",
) -> None:
    """Print the logs of a run's pods, oldest first; they are read through the kubeconfig."""
    from pipelines.submit import Server

    for name, text in Server(host, namespace).logs(run_id, stage):
        for line in text.splitlines():
            print(f"{name} | {line}")


@app.command(epilog="Example: qdflash wait 5f0c… --retries 5")
def wait(run_id: RunId, retries: Retries = 0, host: Host = None, namespace: Namespace = "qdflash") -> None:
    """Wait until a run has ended; the exit code is that of the first stage that failed for good, 0 when none did."""
    from pipelines.submit import Server

    raise typer.Exit(
        Server(host, namespace).wait(run_id, retries, lambda line: print(time.strftime("%H:%M:%S"), line, flush=True))
    )


@app.command(epilog="Example: qdflash retry 5f0c…")
def retry(run_id: RunId, host: Host = None, namespace: Namespace = "qdflash") -> None:
    """Start the failed tasks of a run again; each goes on where it was."""
    from pipelines.submit import Server

    Server(host, namespace).retry(run_id)


@app.command(epilog="Example: qdflash cancel 5f0c…")
def cancel(run_id: RunId, host: Host = None, namespace: Namespace = "qdflash") -> None:
    """End a run; what its tasks have put into the store stays."""
    from pipelines.submit import Server

    Server(host, namespace).cancel(run_id)
