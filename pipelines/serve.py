"""``qdflash serve``: vLLM's OpenAI server on a bundle, with the bundle's own flags."""

import os
import socket
from pathlib import Path

from components.bundle.fit import drafter_shape
from components.contract.errors import UserError
from components.serving.arguments import arguments, environment
from components.serving.lifetime import VARIABLE as END_WITH_PARENT
from components.serving.profiles import DRAFT_FOLDER, SERVING_FILE, read_serving
from components.serving.start import ALWAYS, check
from components.store import cache
from components.store.artifact import read_manifest
from components.store.backend import Store
from pipelines.interpreters import interpreter
from pipelines.plan import make_plan
from pipelines.recipe import Recipe


def bundle_of(recipe: Recipe, store: Store, called: str) -> Path:
    """Return a local folder of a recipe's bundle; ``called`` names recipe and overrides on a command line."""
    task = next(task for task in make_plan(recipe, store).tasks if task.stage == "bundle")
    artifact = read_manifest(store, task.stage, task.digest)
    if artifact is None:
        raise UserError(f"recipe {recipe.name}: its bundle is not made yet; qdflash run {called}")
    return cache.fetch(artifact)


def demand_free(port: int) -> None:
    """Raise :class:`UserError` when something listens on the port already: vLLM would say so a minute later."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(f"port {port}: {error.strerror}; end what listens there, or choose another") from error


def command(folder: Path, profile_name: str, port: int, draft: bool) -> tuple[list[str], dict[str, str]]:
    """Return the server's argv and whole environment. ``draft`` false serves the target alone.

    Every file is compared with the bundle's checksums before any of them is believed.

    Raises:
        UserError: a file that is not the bundle's, an unknown profile, or more drafted tokens than a block holds.
    """
    serving = read_serving(folder)
    check(folder, None)
    profile = serving.profile(profile_name)
    drafter = folder / DRAFT_FOLDER
    drafted, most = profile.num_speculative_tokens or 1, drafter_shape(drafter).block_size - 1
    if draft and drafted > most:
        raise UserError(
            f"{folder / SERVING_FILE}: profiles.{profile_name}.num_speculative_tokens is {drafted}; "
            f"the drafter's block size {most + 1} allows at most {most}"
        )
    argv = arguments(
        profile, folder, drafter if draft else None, served_model_name=serving.served_model_name, port=port
    )
    executable = Path(interpreter("vllm")).with_name("vllm")
    if not executable.exists():
        raise UserError(f"{executable}: missing; the vllm role has no vLLM, run make setup")
    return [str(executable), *argv[1:], *ALWAYS], {**os.environ, **environment(profile), END_WITH_PARENT: "1"}
