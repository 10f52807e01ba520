"""Deploy, roll back, take down: revisions of one name in a namespace, in an order that can be gone back."""

import json
from collections.abc import Callable
from typing import Any

from components.contract.errors import StageError, UserError, one_line
from pipelines.deployment.api import Namespace, Object
from pipelines.deployment.chart import ROUTE, canary_of, over, port_of, render, route_of
from pipelines.deployment.evidence import Evidence
from pipelines.deployment.lock import held
from pipelines.deployment.preflight import damaged, demand_rights, findings
from pipelines.deployment.record import DEPLOYED, FAILED, Record, Revision
from pipelines.deployment.smoke import smoke
from pipelines.deployment.waiting import wait

Say = Callable[[str], None]
SLACK_SECONDS = 600.0
STARTUP_SECONDS = 1800.0


def deploy(
    namespace: Namespace, name: str, evidence: Evidence, changes: list[dict[str, Any]], dry: bool, say: Say
) -> None:
    """Put a gated bundle into service, or leave the namespace as it was.

    ``changes`` are the operator's values over the deploy stage's. Nothing is applied before every object has been
    accepted in a dry run; when the service does not become ready or fails its smoke test, the revision before is put
    back (without one, everything is taken away) and the error says so. A deploy of what serves already changes
    nothing and tests it again. ``dry`` ends before the first change.
    """
    mine: dict[str, Any] = {}
    for one in changes:
        mine = over(mine, one)
    objects, values = render(over(evidence.values, mine), name, namespace.name)
    say(f"Kubernetes {namespace.version()}, namespace {namespace.name}")
    demand_rights(namespace, objects)
    found = list(findings(namespace, values))
    for is_fault, line in found:
        say(line if not is_fault else f"fault: {line}")
    faults = [line for is_fault, line in found if is_fault] + damaged(evidence.bundle)
    if faults:
        raise UserError(f"{name}: not deployed: {'; '.join(faults)}")
    say(f"bundle {evidence.bundle.digest[:16]}: every file as its manifest says, gate passed")
    if dry:
        _announce(namespace, objects, Record(namespace, name).standing, say)
        return
    with held(namespace, name) as renew:
        record = Record(namespace, name)
        changed = _announce(namespace, objects, record.standing, say)
        revision = record.begin(evidence.bundle.uri, objects, mine) if changed or record.deployed is None else None
        seconds = float(values["startupMinutes"]) * 60 + SLACK_SECONDS
        try:
            if revision:
                _apply(namespace, objects, record.standing)
            pod = wait(namespace, objects, seconds, say, renew)
            smoke(namespace, pod["metadata"]["name"], port_of(objects), evidence, say, renew)
        except StageError as error:
            if revision is None:
                raise
            raise type(error)(
                f"{name}: {error}; {_restored(namespace, record, revision, error, say, renew)}"
            ) from error
        if revision:
            record.end(revision, DEPLOYED)
    say(f"{name}: revision {record.deployed.number if record.deployed else 0} serves")


def rollback(namespace: Namespace, name: str, say: Say) -> None:
    """Put the revision that served before back, as a new revision, and wait until it is ready."""
    with held(namespace, name) as renew:
        record = Record(namespace, name)
        target = record.previous
        if target is None:
            raise UserError(f"{name}: no revision to go back to; see qdflash deployed")
        revision = record.begin(target.bundle, target.objects, target.values)
        _apply(namespace, target.objects, record.standing)
        wait(namespace, target.objects, STARTUP_SECONDS, say, renew)
        record.end(revision, DEPLOYED, f"as revision {target.number}")
    say(f"{name}: serves as revision {target.number} did")


def undeploy(namespace: Namespace, name: str, say: Say) -> None:
    """Take away every object that was deployed under a name, its route too, and the record of it."""
    with held(namespace, name):
        record = Record(namespace, name)
        if not record.revisions:
            raise UserError(f"{name}: not deployed in namespace {namespace.name} by qdflash deploy")
        if Record(namespace, canary_of(name)).standing:
            raise UserError(f"{name}: {canary_of(name)} is beside it; qdflash abort takes that away first")
        if namespace.plural(*ROUTE):
            namespace.delete(*route_of(name))
        _delete(namespace, record.standing, say)
        record.remove()


def _announce(namespace: Namespace, objects: list[Object], standing: list[Object], say: Say) -> bool:
    """Let the server check every object in a dry run and say what would change; return whether anything would."""
    told = []
    for one in objects:
        live = namespace.get(one["apiVersion"], one["kind"], one["metadata"]["name"])
        after = namespace.apply(one, dry=True)
        what = "new" if live is None else "unchanged" if _content(live) == _content(after) else "changed"
        told.append((what, one))
    gone = _without(standing, objects)
    for what, one in [*told, *(("removed", one) for one in gone)]:
        say(f"{what}: {one['kind']}/{one['metadata']['name']}")
    return bool(gone) or any(what != "unchanged" for what, _ in told)


def _apply(namespace: Namespace, objects: list[Object], standing: list[Object]) -> None:
    """Apply objects, and delete what stands besides them."""
    for one in objects:
        namespace.apply(one)
    _delete(namespace, _without(standing, objects), lambda _: None)


def _restored(
    namespace: Namespace, record: Record, failed: Revision, error: StageError, say: Say, renew: Callable[[], None]
) -> str:
    """Put back what served before a revision that failed, and say how that went."""
    target = record.deployed
    say(f"failed: {one_line(error)}; {f'back to revision {target.number}' if target else 'taking it away'}")
    try:
        renew()  # what another deploy has put into service since is not ours to undo
        if target is None:
            _delete(namespace, record.standing, say)
            record.end(failed, FAILED, one_line(error))
            return "taken away, nothing was deployed before"
        _apply(namespace, target.objects, record.standing)
        record.end(failed, FAILED, one_line(error))
    except StageError as again:
        return f"not undone: {again}; qdflash deploy what served before, or undeploy"
    try:
        wait(namespace, target.objects, STARTUP_SECONDS, say, renew)
    except StageError as again:
        return f"rolled back to revision {target.number}, which is not ready either: {again}"
    return f"rolled back to revision {target.number}, which serves"


def _delete(namespace: Namespace, objects: list[Object], say: Say) -> None:
    for one in reversed(objects):
        if namespace.delete(one["apiVersion"], one["kind"], one["metadata"]["name"]):
            say(f"removed: {one['kind']}/{one['metadata']['name']}")


def _without(standing: list[Object], objects: list[Object]) -> list[Object]:
    """Return what stands and is not among ``objects``, each once."""
    kept, found = {_identity(one) for one in objects}, {_identity(one): one for one in standing}
    return [one for identity, one in found.items() if identity not in kept]


def _identity(one: Object) -> tuple[str, str, str]:
    return one["apiVersion"], one["kind"], one["metadata"]["name"]


def _content(one: Object) -> str:
    """Return an object without its status and what the server counts."""
    counted = ("managedFields", "resourceVersion", "generation")
    metadata = {key: value for key, value in one["metadata"].items() if key not in counted}
    return json.dumps({**one, "metadata": metadata, "status": None}, sort_keys=True)
