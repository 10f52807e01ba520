"""Where a bundle comes from: every artifact above it, by following the manifests' inputs."""

from pathlib import Path
from typing import Any

from components.contract.context import Input, is_stored_file


def lineage(roots: dict[str, Input]) -> dict[str, Any]:
    """Return ``{roots: {port: digest}, artifacts: {digest: …}, files: {sha256: name}}``, down to the first inputs.

    An artifact's entry has ``stage``, ``version``, ``config``, ``salt``, ``versions`` and ``inputs`` (port to
    digests). No address of a store is kept: the digests name everything. Raises
    :class:`~components.contract.errors.UserError` naming an artifact that is not in the store any more.
    """
    artifacts: dict[str, Any] = {}
    files: dict[str, str] = {}
    left = list(roots.values())
    while left:
        one = left.pop()
        if _is_file(one):
            files[one.digest] = Path(one.uri).name
            continue
        if one.digest in artifacts:
            continue
        manifest = one.artifact.manifest
        above = {port: [Input(uri) for uri in uris] for port, uris in manifest["inputs"].items()}
        artifacts[one.digest] = {
            "stage": manifest["stage"],
            "version": manifest["version"],
            "config": manifest["config"],
            "salt": manifest["salt"],
            "versions": manifest["versions"],
            "inputs": {port: [each.digest for each in many] for port, many in above.items()},
        }
        left += [each for many in above.values() for each in many]
    return {
        "roots": {port: one.digest for port, one in roots.items()},
        "artifacts": dict(sorted(artifacts.items())),
        "files": dict(sorted(files.items())),
    }


def _is_file(one: Input) -> bool:
    return is_stored_file(one.uri) or Path(one.uri).is_file()
