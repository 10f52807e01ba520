"""The ``qdflash`` command."""

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from components.contract.errors import TRANSIENT, USER, StageError, UserError, of_environment, of_machine, one_line
from components.store import cache
from pipelines import seaweed
from pipelines.artifacts_cli import app as artifacts_app
from pipelines.bench import app as bench_app
from pipelines.cluster_cli import app as cluster_app
from pipelines.connect import connect
from pipelines.deploy_cli import app as deploy_app
from pipelines.display import console
from pipelines.images_cli import app as images_app
from pipelines.options import (
    SHIPPED,
    Forced,
    Only,
    Overrides,
    RecipeName,
    Start,
    StoreUrl,
    Unforced,
    planned,
    planned_for_pods,
    recipe_at,
)
from pipelines.plan import Plan, render_table, upload_files
from pipelines.recipe import Recipe

if TYPE_CHECKING:
    from pipelines.engine import Runner

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Turn a language model into a W4A16 target and a W4A16 DFlash drafter that serve as a speculative pair.",
)
store_app = typer.Typer(no_args_is_help=True, help="The local S3 server (SeaweedFS) on loopback.")
app.add_typer(store_app, name="store")
app.add_typer(artifacts_app, name="artifacts")
app.add_typer(bench_app, name="bench")
app.add_typer(images_app, name="images")
app.add_typer(cluster_app)
app.add_typer(deploy_app)


@app.command(
    epilog="Examples:\n\nqdflash run smol\n\nqdflash run smol --set gptq.damping=0.05\n\nqdflash run smol --force qad"
)
def run(
    recipe: RecipeName,
    only: Only = None,
    start: Start = None,
    forced: Forced = None,
    unforced: Unforced = None,
    overrides: Overrides = None,
    engine_name: Annotated[
        Literal["local", "docker"], typer.Option("--engine", help="Tasks as processes, or in their roles' images")
    ] = "local",
    store_url: StoreUrl = None,
) -> None:
    """Run a recipe on this machine: what is committed is kept, the rest runs or resumes."""
    from pipelines import summary
    from pipelines.engine import Engine
    from pipelines.progress import Display

    plan = planned(recipe, overrides, store_url, only, start, forced, unforced)
    if other := namesake(recipe_at(recipe, overrides)):
        print(f"qdflash: {other} is called {plan.recipe} too: logs, report and --force are shared", file=sys.stderr)
    out = console()
    engine = Engine(plan, Display(out), _runner(engine_name, plan))
    code = engine.run()
    summary.show(out, plan, connect(store_url), engine.progress, _called(recipe, overrides))
    for state in engine.progress.values():
        if state.state == "failed":
            print(f"qdflash: {state.name}: {state.error} (log: {engine.log_path(state.name)})", file=sys.stderr)
    raise typer.Exit(code)


@app.command(epilog="Examples:\n\nqdflash plan smol\n\nqdflash plan smol --set gptq.damping=0.05 --json")
def plan(
    recipe: RecipeName,
    only: Only = None,
    start: Start = None,
    overrides: Overrides = None,
    json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON")] = False,
    store_url: StoreUrl = None,
) -> None:
    """Say what would run, and why, before anything starts; exit 2 when a task is blocked."""
    from pipelines.artifacts import as_json

    made = planned(recipe, overrides, store_url, only, start)
    if json:
        print(as_json(made.to_json()))
    else:
        console().print(render_table(made))
    raise typer.Exit(USER if any(task.state == "blocked" for task in made.tasks) else 0)


@app.command(
    name="compile",
    epilog="Example, with an image of each role by its digest:\n\nqdflash compile smol -o pipeline.yaml "
    "--store s3://bucket/runs --set cluster.images.core=$CORE --set cluster.images.train=$TRAIN "
    "--set cluster.images.vllm=$VLLM",
)
def compile_(
    recipe: RecipeName,
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write it, a .yaml")],
    to: Annotated[
        Literal["kfp", "kfp-crd", "argo"],
        typer.Option("--format", help="Kubeflow's IR, the same as Kubernetes objects, or an Argo Workflow"),
    ] = "kfp",
    only: Only = None,
    start: Start = None,
    forced: Forced = None,
    unforced: Unforced = None,
    overrides: Overrides = None,
    store_url: StoreUrl = None,
) -> None:
    """Render a recipe for a cluster: what is committed is left out."""
    chosen = planned_for_pods(recipe, overrides, store_url, only, start, forced, unforced)
    output.parent.mkdir(parents=True, exist_ok=True)
    if to == "argo":
        from pipelines import argo

        argo.compile_plan(chosen, output)
    else:
        from pipelines import kubeflow

        kubeflow.compile_plan(chosen, output, objects=to == "kfp-crd")
    upload_files(chosen)
    print(output)


@app.command(
    epilog="Examples:\n\nqdflash serve smol\n\nqdflash serve smol --set gptq.damping=0.05\n\n"
    "qdflash serve ./bundle --profile a10g --port 8080"
)
def serve(
    bundle: Annotated[str, typer.Argument(help="A bundle's folder, an artifact (address or digest), or a recipe")],
    profile: Annotated[str, typer.Option(help="Which profile of the bundle's serving.yaml")] = "cpu",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on 127.0.0.1")] = 8000,
    draft: Annotated[bool, typer.Option(help="Serve with the drafter, or the target alone")] = True,
    overrides: Overrides = None,
    store_url: StoreUrl = None,
) -> None:
    """Serve a bundle with vLLM's OpenAI server on loopback."""
    from pipelines.artifacts import find
    from pipelines.serve import bundle_of, command, demand_free

    demand_free(port)
    folder = Path(bundle)
    if not folder.is_dir():
        is_recipe = folder.suffix in (".yaml", ".yml") or bundle in SHIPPED
        if overrides and not is_recipe:
            raise UserError(f"--set: {bundle} is no recipe; an artifact's knobs are fixed")
        if is_recipe:
            folder = bundle_of(recipe_at(bundle, overrides), connect(store_url), _called(bundle, overrides))
        else:
            found = find(connect(store_url), bundle)
            if found.stage != "bundle":
                raise UserError(f"{bundle}: a {found.stage}, no bundle; qdflash artifacts list bundle names them")
            folder = cache.fetch(found)
    argv, environment = command(folder, profile, port, draft)
    print(f"starting vLLM on {folder}; http://127.0.0.1:{port}/health answers once it serves", flush=True)
    os.execve(argv[0], argv, environment)


@app.command(epilog="Examples:\n\nqdflash compare smol my-smol.yaml\n\nqdflash compare smol report/3fa9 -o page.html")
def compare(
    one: Annotated[str, typer.Argument(help="A recipe, or the report of a run (address or digest)")],
    other: Annotated[str, typer.Argument(help="Another")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Where to write the page")] = Path("compare.html"),
    store_url: StoreUrl = None,
) -> None:
    """Write the report page of two runs side by side, with what was asked for differently."""
    from pipelines.compare import run_of, write

    store, runs = connect(store_url), {}
    for text in (one, other):
        is_recipe = Path(text).suffix in (".yaml", ".yml") or text in SHIPPED
        runs[text] = run_of(store, text, recipe_at(text) if is_recipe else None)
    if len(runs) < 2:
        raise UserError(f"compare: {one} twice; name two runs (qdflash artifacts list report)")
    write(runs, output)
    print(output)


@app.command(epilog="Example: qdflash doctor")
def doctor(store_url: StoreUrl = None) -> None:
    """Say what this machine can and cannot do; exit 2 when the pipeline cannot run here."""
    from pipelines.doctor import examine

    out = console()
    findings = examine(store_url)
    colours = {"ok": "green", "note": "yellow", "fault": "red"}
    for finding in findings:
        line = f"[{colours[finding.level]}]{finding.level:<6}[/]{finding.what}: "
        out.print(line + finding.says.replace("[", "\\["), soft_wrap=True, highlight=False)
    raise typer.Exit(USER if any(finding.level == "fault" for finding in findings) else 0)


@store_app.command()
def up() -> None:
    """Start the local store unless it runs; its data and key stay in the project's state folder."""
    print(seaweed.up()["AWS_ENDPOINT_URL_S3"])


@store_app.command()
def down() -> None:
    """Stop the local store; its data stay."""
    print("stopped" if seaweed.down() else "was not running")


@store_app.command()
def status(json: Annotated[bool, typer.Option("--json", help="Print as JSON")] = False) -> None:
    """Say whether the local store runs, and where; exit 75 when it does not."""
    from pipelines.artifacts import as_json

    found = seaweed.status()
    where = f"{found['endpoint']} (pid {found['pid']})" if found["running"] else "not running"
    print(as_json(found) if json else f"{where}, {found['bytes'] / 1e6:.0f} MB in {found['data']}")
    raise typer.Exit(0 if found["running"] else TRANSIENT)


@store_app.command(epilog='Example: eval "$(qdflash store env --secret)"')
def env(secret: Annotated[bool, typer.Option("--secret", help="Print the secret key too")] = False) -> None:
    """Start the local store and print its variables for a shell; the secret only with --secret."""
    for name, value in (seaweed.up() | {"QDFLASH_STORE": seaweed.DEFAULT_STORE}).items():
        shown = value if secret or name != "AWS_SECRET_ACCESS_KEY" else None
        print(f"export {name}={value}" if shown else f"# {name} is left out; ask with --secret")


def namesake(recipe: Recipe) -> Path | None:
    """Return the other recipe file that ran here last under this recipe's name, if there is one."""
    claim = cache.home() / "logs" / recipe.name / "recipe"
    before = Path(claim.read_text()) if claim.exists() else recipe.path
    claim.parent.mkdir(parents=True, exist_ok=True)
    claim.write_text(str(recipe.path))
    return before if before != recipe.path and before.exists() else None


def _runner(engine_name: str, plan: Plan) -> "Runner":
    """Return what starts the tasks; Docker's client is imported only where it is used."""
    if engine_name == "docker":
        from pipelines.containers import Containers

        return Containers(plan)
    from pipelines.processes import Processes

    return Processes()


def _called(recipe: str, overrides: list[str] | None) -> str:
    """Return a recipe with its overrides as a command line names them."""
    return shlex.join([recipe, *(word for one in overrides or () for word in ("--set", one))])


def main() -> None:
    """Run the command; our errors are one line on stderr and an exit code (see components.contract.errors)."""
    try:
        app(prog_name="qdflash")
    except StageError as error:
        print(f"qdflash: {one_line(error)}", file=sys.stderr)
        sys.exit(error.exit_code)
    except ModuleNotFoundError as error:
        lacks = of_environment(error, "core")
        if lacks is None:
            raise
        print(f"qdflash: {one_line(lacks)}", file=sys.stderr)
        sys.exit(lacks.exit_code)
    except OSError as error:
        fault = of_machine(error)
        if fault is None:
            raise
        print(f"qdflash: {one_line(fault)}", file=sys.stderr)
        sys.exit(fault.exit_code)


if __name__ == "__main__":
    main()
