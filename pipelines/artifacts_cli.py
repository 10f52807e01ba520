"""``qdflash artifacts``: list, show, verify, export, rm, gc."""

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from components.contract.errors import UserError
from components.store.artifact import remove, verify
from pipelines import artifacts
from pipelines.connect import connect
from pipelines.display import console
from pipelines.why import listed

app = typer.Typer(no_args_is_help=True, help="What lies in the store.")

StoreUrl = Annotated[
    str | None,
    typer.Option("--store", help="s3://bucket/prefix or a folder; else QDFLASH_STORE, else the local server"),
]
Json = Annotated[bool, typer.Option("--json", help="Print as JSON")]
Name = Annotated[str, typer.Argument(help="An address, stage/digest, or the beginning of a digest")]


@app.command(name="list", epilog="Example: qdflash artifacts list bundle")
def list_(
    stage: Annotated[str | None, typer.Argument(help="Only this stage's")] = None,
    json: Json = False,
    store_url: StoreUrl = None,
) -> None:
    """List committed artifacts, each with the knobs that tell it from the others of its stage."""
    rows = list(artifacts.rows(connect(store_url), stage))
    if json:
        print(artifacts.as_json(rows))
        return
    if not rows:
        print("nothing is committed yet (qdflash run RECIPE)", file=sys.stderr)
        return
    table = Table(box=None)
    for column in ("stage", "digest", "committed"):
        table.add_column(column, no_wrap=True)
    for column in ("s", "files", "MB"):
        table.add_column(column, justify="right")
    table.add_column("unlike the others", overflow="fold")
    for row in rows:
        seconds, megabytes = f"{row['seconds']:.0f}", f"{row['bytes'] / 1e6:.1f}"
        apart = listed(row["apart"])
        cells = (row["stage"], row["digest"][:12], row["committed"], seconds, str(row["files"]), megabytes)
        table.add_row(*cells, escape(apart))
    console().print(table)


@app.command(epilog="Example: qdflash artifacts show 3fa9")
def show(artifact: Name, json: Json = False, store_url: StoreUrl = None) -> None:
    """Print an artifact's manifest: files, config, inputs, versions, seconds, metrics."""
    found = artifacts.find(connect(store_url), artifact)
    if json:
        print(artifacts.as_json(found.manifest))
        return
    out = console()
    out.print(found.uri, highlight=False, soft_wrap=True)
    for name in ("version", "seconds", "salt", "config", "inputs", "versions", "phases", "metrics"):
        out.print(f"[bold]{name}[/]")
        out.print_json(data=found.manifest[name])
    for entry in found.files:
        out.print(f"{entry['size']:>14,}  {entry['sha256'][:16]}  {entry['path']}", highlight=False, markup=False)


@app.command(name="verify", epilog="Example: qdflash artifacts verify 3fa9")
def verify_(
    artifact: Annotated[str | None, typer.Argument(help="One artifact; all when left out")] = None,
    store_url: StoreUrl = None,
) -> None:
    """Read artifacts back and compare every byte with the manifest; exit 2 when one is damaged."""
    store = connect(store_url)
    chosen = [artifacts.find(store, artifact)] if artifact else list(artifacts.every(store))
    faults = []
    with tempfile.TemporaryDirectory() as scratch:
        for one in chosen:
            faults += verify(one, Path(scratch))
    for fault in faults:
        print(fault, file=sys.stderr)
    if faults:
        raise UserError(
            f"{_count(len(faults), 'damaged file')}; remove the artifacts (qdflash artifacts rm) and run again"
        )
    print(f"{_count(len(chosen), 'artifact')}: every byte is as committed")


@app.command(
    epilog="Examples:\n\nqdflash artifacts export 3fa9 ./bundle\n\nqdflash artifacts export 3fa9 ./bf16 --dense"
)
def export(
    artifact: Name,
    folder: Annotated[Path, typer.Argument(help="New or empty")],
    dense: Annotated[
        bool,
        typer.Option(
            "--dense", help="Unpack a W4A16 model to BF16: codes × scales; of a bundle its target, no draft/"
        ),
    ] = False,
    store_url: StoreUrl = None,
) -> None:
    """Copy an artifact's files into a folder."""
    left = artifacts.export(artifacts.find(connect(store_url), artifact), folder, dense)
    print(folder)
    if left:
        print(f"left out, as it is not of the dense model: {', '.join(left)}", file=sys.stderr)


@app.command(epilog="Example: qdflash artifacts rm 3fa9")
def rm(artifact: Name, store_url: StoreUrl = None) -> None:
    """Remove an artifact; the next run makes it again."""
    store, stage, digest = artifacts.locate(artifact, lambda: connect(store_url))
    remove(store, stage, digest)
    print(f"removed {store.uri(f'{stage}/{digest}')}")


@app.command(epilog="Examples:\n\nqdflash artifacts gc\n\nqdflash artifacts gc --keep smol --delete")
def gc(
    keep: Annotated[
        list[str] | None,
        typer.Option(
            "--keep",
            metavar="RECIPE",
            help="Also drop artifacts that none of these recipes reach, unchanged: what --set made goes; repeatable",
        ),
    ] = None,
    datasets: Annotated[bool, typer.Option("--datasets", help="Also drop the copies of hub data sets")] = False,
    delete: Annotated[bool, typer.Option("--delete", help="Really delete; without it only say what would go")] = False,
    json: Json = False,
    store_url: StoreUrl = None,
) -> None:
    """Find left-over attempts, finished work and, with --keep, unreachable artifacts. Work in progress stays."""
    from pipelines.cli import recipe_at
    from pipelines.plan import make_plan

    store = connect(store_url)
    digests = [task.digest for name in keep or () for task in make_plan(recipe_at(name), store).tasks]
    found = artifacts.garbage(store, digests, datasets)
    if delete:
        artifacts.remove_garbage(store, found)
    if json:
        print(artifacts.as_json([{"key": one.key, "why": one.why} for one in found]))
        return
    for one in found:
        print(f"{'removed' if delete else 'would remove'} {store.uri(one.key)}: {one.why}")
    print(_count(len(found), "thing") + ("" if delete or not found else "; --delete removes what is listed"))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
