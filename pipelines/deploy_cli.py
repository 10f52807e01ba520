"""``qdflash deploy`` and what follows it: a bundle as a service in a namespace of a cluster."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pipelines.options import StoreUrl

if TYPE_CHECKING:
    from pipelines.deployment.evidence import Evidence

app = typer.Typer()

Name = Annotated[str, typer.Option(help="What the service is called; objects bear this name")]
Bundle = Annotated[str, typer.Argument(help="A bundle whose gate passed, or its deploy artifact (address or digest)")]
Values = Annotated[
    list[Path] | None, typer.Option(help="Values of charts/qdflash over the deploy stage's; repeatable")
]
Where = Annotated[str, typer.Option(help="Namespace of the kubeconfig's cluster; see manifests/README.md")]


@app.command(epilog="Examples:\n\nqdflash deploy 3fa9 --values my-values.yaml\n\nqdflash deploy 3fa9 --dry-run")
def deploy(
    bundle: Bundle,
    values: Values = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and say what would change")] = False,
    name: Name = "pair",
    namespace: Where = "qdflash",
    store_url: StoreUrl = None,
) -> None:
    """Serve a bundle on a cluster: check, apply, wait, test; what fails is rolled back, and the exit code is not 0."""
    from pipelines.deployment import rollout
    from pipelines.deployment.api import Namespace
    from pipelines.deployment.chart import read_values

    changes = [read_values(path) for path in values or ()]
    rollout.deploy(Namespace(namespace), name, _evidence(bundle, store_url), changes, dry_run, _say)


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


@app.command(epilog="Example: qdflash canary 3fa9 --weight 10 --gateway gateways/public --host pair.example")
def canary(
    bundle: Bundle,
    weight: Annotated[int, typer.Option(min=1, max=50, help="Percent of the requests that it takes")] = 10,
    gateway: Annotated[
        str | None, typer.Option(metavar="NAMESPACE/NAME", help="Gateway of the route, to make it or to move it")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Host name of the route")] = None,
    values: Values = None,
    name: Name = "pair",
    namespace: Where = "qdflash",
    store_url: StoreUrl = None,
) -> None:
    """Serve a bundle beside the one that serves, on a share of the requests that come through an HTTPRoute."""
    from pipelines.deployment import canary as beside
    from pipelines.deployment.api import Namespace
    from pipelines.deployment.chart import read_values

    changes, evidence = [read_values(path) for path in values or ()], _evidence(bundle, store_url)
    beside.start(Namespace(namespace), name, evidence, changes, weight, gateway, host, _say)


@app.command(epilog="Example: qdflash promote --minutes 60")
def promote(
    minutes: Annotated[float, typer.Option(min=0, help="How long both are watched")] = 30,
    name: Name = "pair",
    namespace: Where = "qdflash",
    store_url: StoreUrl = None,
) -> None:
    """Watch the canary beside the other: no worse, it takes the other's place; worse, it is taken away and exit 3."""
    from pipelines.deployment import canary as beside
    from pipelines.deployment.api import Namespace

    beside.promote(Namespace(namespace), name, lambda uri: _evidence(uri, store_url), minutes * 60, _say)


@app.command(epilog="Example: qdflash abort")
def abort(name: Name = "pair", namespace: Where = "qdflash") -> None:
    """Take the canary away; the other takes all requests again."""
    from pipelines.deployment import canary as beside
    from pipelines.deployment.api import Namespace

    beside.abort(Namespace(namespace), name, _say)


def _evidence(bundle: str, store_url: str | None) -> "Evidence":
    """Find a bundle in its own store where an address names one, else in the chosen one."""
    from components.store.artifact import split_uri
    from pipelines.connect import connect
    from pipelines.deployment.evidence import gather

    return gather(connect(split_uri(bundle)[0] if "://" in bundle else store_url), bundle)


def _say(line: str) -> None:
    print(line, flush=True)
