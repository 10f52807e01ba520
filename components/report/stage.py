"""Report: everything a run committed, on one HTML page that opens from disk."""

from typing import Any

from pydantic import Field

from components.contract.context import Inputs, Output
from components.contract.digest import StageConfig
from components.contract.errors import UserError
from components.contract.stage import Port

ROLE = "core"
VERSION = 13
INPUTS = {"stages": Port("every artifact of the run", many=True)}
OUTPUTS = {"index.html": "the page: no network, no script, light and dark, printable"}
PAGE = "index.html"


class Config(StageConfig):
    """What the page is called and which input is which."""

    title: str = Field("qdflash", description="Title of the page: the recipe's name")
    names: list[str] = Field(description="Task names of the inputs, in order")
    samples: int = Field(6, description="Prompts shown side by side", ge=0)


def run(config: Config, inputs: Inputs, output: Output) -> dict[str, Any]:
    """Write ``index.html``. Metrics: ``sections``, ``bytes``, ``figures`` {``task.metric``: number}."""
    from components.report.collect import collect
    from components.report.page import render
    from components.report.table import headline

    bound = inputs.all("stages")
    if len(bound) != len(config.names):
        raise UserError(f"report: {len(config.names)} names for {len(bound)} inputs; they must match in order")
    tasks = collect(dict(zip(config.names, bound, strict=True)))
    html, sections = render(config.title, tasks, config.samples)
    (output.path / "index.html").write_text(html, encoding="utf-8")
    return {"sections": sections, "bytes": len(html.encode()), "figures": headline(tasks)}
