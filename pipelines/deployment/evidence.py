"""What stands behind a deployment: the bundle, its gate, and how the pair was measured."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

import yaml

from components.contract.errors import GateError, UserError
from components.store.artifact import Artifact
from components.store.backend import Store
from pipelines.artifacts import every, find

SMOKE_PROMPTS = 8


@dataclass(frozen=True)
class Evidence:
    """A gated bundle: ``values`` are the deploy stage's; ``prompts`` of its measurement, with the drafts they took.

    ``expected`` is the acceptance length measured on these prompts, ``floor`` the lower 95 % bound on all of them,
    moved to these; both None where acceptance was not measured.
    """

    bundle: Artifact
    values: dict[str, Any]
    prompts: list[dict[str, Any]]
    expected: float | None
    floor: float | None


def gather(store: Store, text: str) -> Evidence:
    """Return the evidence for a bundle, or for an artifact of the deploy stage, given by address or digest.

    Raises :class:`UserError` when it is neither or no deploy stage has run on it, :class:`GateError` when the gate
    refused it.
    """
    found = find(store, text)
    if found.stage == "bundle":
        made = [one for one in every(found.store, "deploy") if found.digest in _digests(one, "bundle")]
        if not made:
            raise UserError(
                f"bundle {found.digest[:16]}: no deploy stage has run on it; qdflash run RECIPE, its gate too"
            )
        deployed, bundle = made[0], found
    elif found.stage == "deploy":
        deployed, bundle = found, find(found.store, found.manifest["inputs"]["bundle"][0])
    else:
        raise UserError(f"{text}: a {found.stage}, neither bundle nor deploy; qdflash artifacts list bundle")
    verdict = find(found.store, deployed.manifest["inputs"]["verdict"][0])
    if not verdict.metrics["passed"]:
        raise GateError(f"bundle {bundle.digest[:16]}: the gate refused it: {', '.join(verdict.metrics['failed'])}")
    values = yaml.safe_load(_read(deployed, "values.yaml"))
    prompts, expected, floor = _measured(verdict, bundle, values["bundle"].get("acceptanceFloor"))
    return Evidence(bundle, values, prompts, expected, floor)


def _measured(
    verdict: Artifact, bundle: Artifact, floor: float | None
) -> tuple[list[dict[str, Any]], float | None, float | None]:
    """Return the first prompts with their drafts, the acceptance length on them, and the bound for them."""
    uris = [uri for found in verdict.manifest["inputs"].values() for uri in found]
    for one in (find(verdict.store, uri) for uri in uris):
        if floor is None or bundle.digest not in _digests(one) or "acceptance_length" not in one.metrics:
            continue
        samples = [json.loads(line) for line in _read(one, "samples.jsonl").splitlines()]
        asked = [sample for sample in samples if sample["concurrency"] == 1 and sample["drafts"]]
        prompts = asked[:SMOKE_PROMPTS]
        expected = 1 + sum(sum(one["accepted"]) for one in prompts) / sum(one["drafts"] for one in prompts)
        return prompts, expected, floor * expected / one.metrics["acceptance_length"]["value"]
    return [], None, None


def _read(artifact: Artifact, path: str) -> bytes:
    """Return a file as its manifest says it is."""
    data = artifact.store.read(artifact.key(path))
    wanted = {one["sha256"] for one in artifact.files if one["path"] == path}
    if data is None or {hashlib.sha256(data).hexdigest()} != wanted:
        raise UserError(f"{artifact.uri}: {path} is missing or altered; qdflash artifacts verify says more")
    return data


def _digests(artifact: Artifact, port: str | None = None) -> set[str]:
    inputs = artifact.manifest["inputs"]
    found = inputs.get(port, []) if port else [uri for uris in inputs.values() for uri in uris]
    return {uri.rstrip("/").rpartition("/")[2] for uri in found}
