"""The values that the chart ``charts/qdflash`` needs of one bundle; everything else in it is the operator's."""

from typing import Any

from components.contract.errors import UserError
from components.serving.arguments import arguments, environment
from components.serving.profiles import DRAFT_FOLDER, Serving
from components.store.artifact import Artifact

MODELS = "/mnt/models"
PORT = 8080


def values(bundle: Artifact, serving: Serving, profile_name: str, image: str) -> dict[str, Any]:
    """Return ``image``, ``bundle`` and ``serving``: where the files are, and every argument and variable of vLLM.

    ``bundle.uri`` ends in a slash: KServe's storage initialiser lists by raw prefix and would otherwise also fetch
    neighbours whose name begins alike. Raises :class:`UserError` when the bundle has no such profile or leaves the
    number of drafted tokens open.
    """
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
        "bundle": {"artifact": bundle.uri, "uri": bundle.store.uri(bundle.key(""))},
        "serving": {"port": PORT, "args": command[1:], "env": environment(profile)},
    }
