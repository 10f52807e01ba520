"""``qdflash serve``: vLLM's OpenAI server on a bundle, with the bundle's own flags."""

import os
import socket
from pathlib import Path

from components.contract.errors import UserError
from components.serving.arguments import arguments, environment
from components.serving.profiles import DRAFT_FOLDER, read_serving
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
            raise UserError(f"--port {port}: {error.strerror}; choose another") from error


def command(folder: Path, profile_name: str, port: int, draft: bool) -> tuple[list[str], dict[str, str]]:
    """Return the server's argv and whole environment. ``draft`` false serves the target alone."""
    serving = read_serving(folder)
    profile = serving.profile(profile_name)
    drafter = folder / DRAFT_FOLDER if draft and (folder / DRAFT_FOLDER).is_dir() else None
    argv = arguments(profile, folder, drafter, served_model_name=serving.served_model_name, port=port)
    executable = Path(interpreter("vllm")).with_name("vllm")
    if not executable.exists():
        raise UserError(f"{executable}: missing; the vllm role has no vLLM, run make setup")
    return [str(executable), *argv[1:]], {**os.environ, **environment(profile)}
