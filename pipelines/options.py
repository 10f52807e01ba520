"""Arguments and options that several ``qdflash`` commands share."""

import os
from pathlib import Path
from typing import Annotated

import typer

from components.contract.errors import UserError
from pipelines.connect import connect
from pipelines.plan import Plan, Selection, demand_pods, force, make_plan, unforce
from pipelines.recipe import Recipe, load_recipe

SHIPPED = {path.stem: path for path in sorted(Path(__file__).with_name("recipes").glob("*.yaml"))}

RecipeName = Annotated[
    str, typer.Argument(help=f"A recipe file, or one that comes with qdflash: {', '.join(SHIPPED)}")
]
StoreUrl = Annotated[
    str | None,
    typer.Option("--store", help="s3://bucket/prefix or a folder; else QDFLASH_STORE, else the local server"),
]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="PATH=VALUE", help="Override a field; repeatable")
]
Only = Annotated[list[str] | None, typer.Option("--only", metavar="STAGE", help="Run just these; repeatable")]
Forced = Annotated[
    list[str] | None,
    typer.Option("--force", metavar="STAGE", help="Make it anew, and so all below it; holds until --unforce"),
]
Unforced = Annotated[
    list[str] | None, typer.Option("--unforce", metavar="STAGE", help="Go back to the artifact before --force")
]
Start = Annotated[
    list[str] | None, typer.Option("--from", metavar="STAGE", help="Run these and all below them; repeatable")
]


def recipe_at(text: str, overrides: list[str] | None = None) -> Recipe:
    """Load a recipe from a path, or by name from those that come with the package."""
    path = Path(text)
    if not path.is_file() and path.suffix not in (".yaml", ".yml"):
        if text not in SHIPPED:
            raise UserError(
                f"recipe {text}: no such file, and none of those that come with qdflash ({', '.join(SHIPPED)})"
            )
        path = SHIPPED[text]
    return load_recipe(path, overrides or [])


def planned(
    recipe: str,
    overrides: list[str] | None,
    store_url: str | None,
    only: list[str] | None = None,
    start: list[str] | None = None,
    forced: list[str] | None = None,
    unforced: list[str] | None = None,
) -> Plan:
    """Return the plan that a command's options ask for, after recording in the store what is forced or no longer."""
    loaded, store = recipe_at(recipe, overrides), connect(store_url)
    selection = Selection(tuple(only or ()), tuple(start or ()))
    plan = make_plan(loaded, store, selection)  # a wrong name must not leave a salt behind
    if forced:
        force(loaded, store, forced)
    if unforced:
        unforce(loaded, store, unforced)
    return make_plan(loaded, store, selection) if forced or unforced else plan


def planned_for_pods(
    recipe: str,
    overrides: list[str] | None,
    store_url: str | None,
    only: list[str] | None,
    start: list[str] | None,
    forced: list[str] | None,
    unforced: list[str] | None,
) -> Plan:
    """Return the plan that a cluster is to run; nothing is forced before it is known that pods can run it."""
    if not store_url and not os.environ.get("QDFLASH_STORE"):
        raise UserError("pods cannot reach the local store; give --store s3://bucket/prefix or QDFLASH_STORE")
    plan = planned(recipe, overrides, store_url, only, start)
    demand_pods(plan)
    return planned(recipe, overrides, store_url, only, start, forced, unforced) if forced or unforced else plan
