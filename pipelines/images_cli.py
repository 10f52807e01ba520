"""``qdflash images``: build the roles' images, push and pin them, check what is pinned."""

from enum import StrEnum
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.status import Status

from components.contract.errors import USER

app = typer.Typer(no_args_is_help=True, help="The roles' images: build, push and pin, check. Needs a Docker engine.")

Role = StrEnum("Role", ["core", "train", "vllm"])


@app.command(epilog="Example: qdflash images build --base python:3.11-slim@sha256:… --accelerator gpu")
def build(
    base: Annotated[str, typer.Option(help="Python 3.11 or 3.12: NAME@sha256:…, or an image of this engine")],
    builder: Annotated[
        str | None, typer.Option(help="What packages are installed on, when not the base; see images/Dockerfile")
    ] = None,
    role: Annotated[list[Role] | None, typer.Option(help="Just these; repeatable")] = None,
    accelerator: Annotated[Literal["cpu", "gpu"], typer.Option(help="Which locks of train and vllm")] = "gpu",
) -> None:
    """Build images from images/Dockerfile and the locks, by digest of their base."""
    from pipelines import images

    client = images.engine()
    console = Console(stderr=True)
    for one in role or Role:
        with console.status(one) as status:

            def say(line: str, status: Status = status) -> None:
                if ": Step " in line or not console.is_terminal:
                    console.print(line, markup=False, highlight=False, soft_wrap=True)
                else:
                    status.update(line[: console.width - 4].replace("[", "\\["))

            image = images.build(client, str(one), accelerator, base, builder, say)
        print(f"{one}: qdflash-{one}@{image.id} {image.attrs['Size'] / 1e6:.0f} MB")


@app.command(epilog="Example: qdflash images lock registry.example/team")
def lock(registry: Annotated[str, typer.Argument(help="Where to push: HOST, with :PORT or /PREFIX if any")]) -> None:
    """Push the images that were built and write their digests to images/lock.yaml, which recipes go by."""
    from pipelines import images

    console = Console(stderr=True)
    locked = images.lock(images.engine(), registry, lambda line: console.print(line, markup=False, soft_wrap=True))
    for role, name in locked.items():
        print(f"{role}: {name}")


@app.command(epilog="Example: qdflash images verify")
def verify() -> None:
    """Check that the images of images/lock.yaml are in their registry and made from these files; else exit 2."""
    from pipelines import images

    faults = list(images.verify(images.engine()))
    for role, fault in faults:
        print(f"{role}: {fault}")
    if not faults:
        print(f"{images.LOCK}: all there, made from these files")
    raise typer.Exit(USER if faults else 0)
