"""What ``qdflash bench`` asks for: one kind of measurement on one or two servers that run already."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from components.contract.digest import StageConfig
from components.measure.stage import Config

RESULT = "result.json"

Kind = Literal["parity", "acceptance", "latency", "quality"]


class Job(StageConfig):
    """A measurement: whose, with which of the measure stage's settings, and where its inputs lie."""

    kind: Kind = Field(description="What is measured")
    urls: tuple[str, ...] = Field(
        description="The server, and the one it is compared with", min_length=1, max_length=2
    )
    config: Config = Field(description="The measure stage's config; its profile is the server's own business")
    model: str | None = Field(None, description="Which served model; None: the only one")
    invocations: bool = Field(False, description="Ask through /invocations")
    tokenizer: Path | None = Field(None, description="Folder of the model's tokenizer; None: the server's /tokenize")
    prompts: Path | None = Field(None, description="JSONL of {id, category, conversations}")
    published: Path | None = Field(None, description="Folder of the published acceptance protocol's data sets")
    texts: Path | None = Field(None, description="JSONL of {context} or {text} for latency; None: generated")
    tasks: tuple[Path, ...] = Field((), description="Quality task files, as the stage's tasks input")
    long_tokens: int = Field(2048, description="Length of parity's long prompts", ge=1)
