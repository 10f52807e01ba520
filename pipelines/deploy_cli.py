"""``qdflash deploy`` and what follows it: a bundle as a service in a namespace of a cluster."""

from pathlib import Path
from typing import Annotated

import typer

from pipelines.options import StoreUrl

app = typer.Typer()

Name = Annotated[str, typer.Option(help="What the service is called; objects bear this name")]
Where = Annotated[str, typer.Option(help="Namespace of the kubeconfig's cluster; see manifests/README.md")]


@app.command(epilog="Examples:\n\nqdflash deploy 3fa9 --values my-values.yaml\n\nqdflash deploy 3fa9 --dry-run")
def deploy(
    bundle: Annotated[
        str, typer.Argument(help="A bundle whose gate passed, or its deploy artifact (address or digest)")
    ],
    values: Annotated[
        list[Path] | None, typer.Option(help="Values of charts/qdflash over the deploy stage's; repeatable")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and say what would change")] = False,
    name: Name = "pair",
    namespace: Where = "qdflash",
    store_url: StoreUrl = None,
) -> None:
    """Serve a bundle on a cluster: check, apply, wait, test; what fails is rolled back, and the exit code is not 0."""
    from pipelines.connect import connect
    from pipelines.deployment import rollout
    from pipelines.deployment.api import Namespace
    from pipelines.deployment.chart import read_values
    from pipelines.deployment.evidence import gather

    changes = [read_values(path) for path in values or ()]
    evidence = gather(connect(store_url), bundle)
    rollout.deploy(Namespace(namespace), name, evidence, changes, dry_run, _say)


@app.command(epilog="Example: qdflash deployed")
def deployed(
    json: Annotated[bool, typer.Option("--json", help="Print as JSON")] = False,
    name: Name = "pair",
    namespace: Where = "qdflash",
) -> None:
    """Say what is deployed under a name, revision by revision, and whether its pods are ready."""
    from pipelines.artifacts import as_json
    from pipelines.deployment.api import Namespace
    from pipelines.deployment.record import Record
    from pipelines.deployment.waiting import standing

    where = Namespace(namespace)
    record = Record(where, name)
    pods = standing(where, record.deployed.objects) if record.deployed else {}
    rows = [
        {"revision": one.number, "state": one.state, "at": one.at, "bundle": one.bundle, "said": one.said}
        for one in record.revisions
    ]
    if json:
        print(as_json({"revisions": rows, "pods": pods}))
        return
    for row in rows or [{"": f"{name}: nothing deployed in namespace {namespace}"}]:
        print("  ".join(str(value) for value in row.values() if value != ""))
    for pod, state in pods.items():
        print(f"  {pod}: {state}")


@app.command(epilog="Example: qdflash rollback")
def rollback(name: Name = "pair", namespace: Where = "qdflash") -> None:
    """Go back to the revision that served before, and wait until it is ready."""
    from pipelines.deployment import rollout
    from pipelines.deployment.api import Namespace

    rollout.rollback(Namespace(namespace), name, _say)


@app.command(epilog="Example: qdflash undeploy")
def undeploy(name: Name = "pair", namespace: Where = "qdflash") -> None:
    """Take a service away, with everything that deploy made for it."""
    from pipelines.deployment import rollout
    from pipelines.deployment.api import Namespace

    rollout.undeploy(Namespace(namespace), name, _say)


def _say(line: str) -> None:
    print(line, flush=True)
