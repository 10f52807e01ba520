"""The values that the chart ``charts/qdflash`` needs of one bundle; everything else in it is the operator's."""

from typing import Any

from components.contract.errors import UserError
from components.serving.arguments import arguments, environment
from components.serving.profiles import DRAFT_FOLDER, SUMS_FILE, Serving
from components.store.artifact import Artifact

MODELS = "/mnt/models"
PORT = 8080


def values(
    bundle: Artifact, serving: Serving, profile_name: str, image: str, acceptance_floor: float | None = None
) -> dict[str, Any]:
    """Return ``image``, ``bundle`` and ``serving``: where the files are, and every argument and variable of vLLM.

    ``bundle.uri`` ends in a slash: KServe's storage initialiser lists by raw prefix and would otherwise also fetch
    neighbours whose name begins alike. ``bundle.sums`` is the sha256 of its SHA256SUMS: who can write to the store
    cannot change what is served. ``bundle.acceptanceFloor`` is the acceptance length below which the service is not
    what was measured, left out where nothing was. Raises :class:`UserError` when the bundle has no such profile, no
    checksums, or leaves the number of drafted tokens open.
    """
    sums = next((one["sha256"] for one in bundle.files if one["path"] == SUMS_FILE), None)
    if sums is None:
        raise UserError(f"deploy: bundle {bundle.digest[:16]} has no {SUMS_FILE}; make it again")
    profile = serving.profile(profile_name)
    if profile.num_speculative_tokens is None:
        raise UserError(f"deploy: profile {profile_name} of serving.yaml sets no num_speculative_tokens")
    command = arguments(
        profile,
        MODELS,
        f"{MODELS}/{DRAFT_FOLDER}",
        served_model_name=serving.served_model_name,
        host="0.0.0.0",
        port=PORT,
    )
    return {
        "image": image,
        "bundle": {
            "artifact": bundle.uri,
            "uri": bundle.store.uri(bundle.key("")),
            "sums": sums,
            **({} if acceptance_floor is None else {"acceptanceFloor": round(acceptance_floor, 4)}),
        },
        "serving": {"port": PORT, "args": command[1:], "env": environment(profile)},
    }
