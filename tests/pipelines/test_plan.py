import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from components.contract.digest import digested, file_sha256
from components.contract.errors import UserError
from components.contract.stage import load
from components.store.artifact import remove
from components.store.backend import Store
from pipelines import artifacts
from pipelines.dag import LocalFile, build
from pipelines.engine import _initial
from pipelines.plan import Plan, Selection, force, make_plan, render_table, unforce
from pipelines.recipe import load_recipe
from tests.components.byte_tokenizer import byte_tokenizer
from tests.pipelines.planning import RECIPES, TINY, commit_all, named, states

BELOW_GPTQ = {"gptq", "bundle", "measure_pair", "gate", "report", "deploy"}


@pytest.fixture
def folder(tmp_path: Path) -> Store:
    return Store(str(tmp_path / "store"))


def plan_of(store: Store, *overrides: str, **selection: tuple[str, ...]) -> Plan:
    return make_plan(load_recipe(TINY, overrides), store, Selection(**selection))


def why(plan: Plan, name: str) -> str:
    return next(task.why for task in plan.tasks if task.name == name)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_binds_the_ports_that_its_stages_declare(path: Path) -> None:
    seen: set[str] = set()
    for task in build(load_recipe(path)):
        ports = load(task.stage).INPUTS
        assert task.inputs.keys() <= ports.keys(), task.name
        assert {name for name, port in ports.items() if not port.optional} <= task.inputs.keys(), task.name
        for port, sources in task.inputs.items():
            assert len(sources) == 1 or ports[port].many
            assert all(isinstance(source, LocalFile) or source in seen for source in sources), task.name
        seen.add(task.name)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_names_that_the_pipeline_fills_in_match_the_inputs_in_order(path: Path) -> None:
    tasks = {task.name: task for task in build(load_recipe(path))}
    for name in ("gate", "report"):
        inputs = [source for sources in tasks[name].inputs.values() for source in sources]
        assert tasks[name].config.names == inputs


def test_an_empty_store_has_everything_to_run(store: Store) -> None:
    plan = plan_of(store)
    assert set(states(plan).values()) == {"run"}
    assert {task.why for task in plan.tasks} == {"never run", "runs every time"}


def test_committed_tasks_are_cached_and_deploy_never_is(store: Store, tmp_path: Path) -> None:
    commit_all(plan_of(store), store, tmp_path / "x")
    assert named(plan_of(store), "run") == {"deploy"}


def test_another_task_of_the_same_stage_is_no_earlier_run(folder: Store, tmp_path: Path) -> None:
    plan = plan_of(folder)
    commit_all(plan, folder, tmp_path / "x")
    remove(folder, "prompts", next(task.digest for task in plan.tasks if task.name == "prompts_a"))
    assert why(plan_of(folder), "prompts_a") == "never run"


def test_salts_that_cannot_be_read_are_named(folder: Store) -> None:
    folder.write("_salts/tiny.json", b'{"qad": ')
    with pytest.raises(UserError, match=r"_salts/tiny.json: not readable; remove it"):
        plan_of(folder)


def test_planning_writes_nothing(folder: Store) -> None:
    plan_of(folder)
    assert not Path(folder.root).exists()


def test_a_late_knob_reruns_only_what_depends_on_it(folder: Store, tmp_path: Path) -> None:
    before = plan_of(folder)
    commit_all(before, folder, tmp_path / "x")
    old = load_recipe(TINY).configs["gptq"].damping
    after = plan_of(folder, "gptq.damping=0.02")
    assert named(after, "run") == BELOW_GPTQ
    assert why(after, "gptq") == f"damping {old} -> 0.02"
    assert why(after, "bundle") == "below gptq"
    unchanged = {task.name: task.digest for task in before.tasks if task.name not in BELOW_GPTQ}
    assert unchanged.items() <= {task.name: task.digest for task in after.tasks}.items()


def test_the_prompt_count_reruns_everything_below(folder: Store, tmp_path: Path) -> None:
    commit_all(plan_of(folder), folder, tmp_path / "x")
    count = load_recipe(TINY).configs["prompts_a"].count
    plan = plan_of(folder, f"prompts_a.count={count - 1}")
    assert named(plan, "cached") == {"teacher", "ptq", "prompts_eval", "measure_baseline"}
    assert why(plan, "prompts_a") == f"count {count} -> {count - 1}"
    assert why(plan, "regen_a") == "below prompts_a"


def test_the_reason_names_the_nearest_artifact_not_the_newest(folder: Store, tmp_path: Path) -> None:
    """measure_pair is committed after measure_baseline; a change of the baseline is told against the baseline."""
    commit_all(plan_of(folder), folder, tmp_path / "x")
    assert why(plan_of(folder, "measure_baseline.seed=77"), "measure_baseline") == "seed 0 -> 77"


def test_a_nested_field_is_named_by_its_path(folder: Store, tmp_path: Path) -> None:
    commit_all(plan_of(folder), folder, tmp_path / "x")
    old = load_recipe(TINY).configs["measure_pair"].answers.prompts
    plan = plan_of(folder, f"measure_pair.answers.prompts={old + 1}")
    assert why(plan, "measure_pair") == f"answers.prompts {old} -> {old + 1}"


def test_a_removed_artifact_is_made_again_and_nothing_below_it(folder: Store, tmp_path: Path) -> None:
    plan = plan_of(folder)
    commit_all(plan, folder, tmp_path / "x")
    gptq = next(task for task in plan.tasks if task.name == "gptq")
    folder.delete(f"gptq/{gptq.digest}")
    assert named(plan_of(folder), "run") == {"gptq", "deploy"}


def test_runtime_fields_change_no_digest(folder: Store) -> None:
    changed = plan_of(folder, "qad.state_every=3")
    assert [task.digest for task in changed.tasks] == [task.digest for task in plan_of(folder).tasks]
    assert "state_every" not in digested(load_recipe(TINY).configs["qad"])
    assert changed != plan_of(folder)


def test_a_forced_task_and_all_below_it_rerun_until_unforced(folder: Store, tmp_path: Path) -> None:
    recipe = load_recipe(TINY)
    commit_all(make_plan(recipe, folder), folder, tmp_path / "x")
    force(recipe, folder, ["gptq"])
    plan = make_plan(recipe, folder)
    assert named(plan, "run") == BELOW_GPTQ
    assert why(plan, "gptq") == "forced"
    assert "--salt" in next(task.argv for task in plan.tasks if task.name == "gptq")
    commit_all(plan, folder, tmp_path / "x")
    assert named(make_plan(recipe, folder), "run") == {"deploy"}
    force(recipe, folder, ["gptq"])
    assert named(make_plan(recipe, folder), "run") == BELOW_GPTQ
    unforce(recipe, folder, ["gptq"])
    assert named(make_plan(recipe, folder), "run") == {"deploy"}


def test_unforcing_what_is_not_forced_says_so(folder: Store) -> None:
    recipe = load_recipe(TINY)
    with pytest.raises(UserError, match="--unforce qad: not forced in recipe tiny; nothing is"):
        unforce(recipe, folder, ["qad"])
    force(recipe, folder, ["gptq"])
    with pytest.raises(UserError, match="forced is gptq"):
        unforce(recipe, folder, ["qad"])


def test_forcing_a_stage_forces_each_of_its_tasks(folder: Store) -> None:
    recipe = load_recipe(TINY)
    force(recipe, folder, ["measure"])
    salted = {task.name for task in make_plan(recipe, folder).tasks if "--salt" in task.argv}
    assert salted == {"measure_baseline", "measure_target", "measure_pair"}


def test_only_runs_a_task_whose_inputs_are_there(folder: Store, tmp_path: Path) -> None:
    everything = plan_of(folder)
    commit_all(everything, folder, tmp_path / "x", {task.name for task in everything.tasks} - BELOW_GPTQ)
    plan = plan_of(folder, only=("gptq",))
    assert named(plan, "run") == {"gptq"}
    assert named(plan, "skipped") == BELOW_GPTQ - {"gptq"}


def test_only_is_blocked_when_an_input_is_not_committed(folder: Store) -> None:
    plan = plan_of(folder, only=("gptq", "bundle"))
    assert named(plan, "blocked") == {"gptq", "bundle"}
    assert why(plan, "gptq") == "drafter_2 is not committed and not selected"
    assert named(plan, "run") == set()


def test_a_cached_gate_runs_again_unless_something_else_is_selected(folder: Store, tmp_path: Path) -> None:
    commit_all(plan_of(folder), folder, tmp_path / "x")

    def begins(plan: Plan) -> str:
        return _initial(next(task for task in plan.tasks if task.name == "gate"))

    assert begins(plan_of(folder)) == "waiting"
    assert begins(plan_of(folder, only=("gptq",))) == "cached"


def test_from_runs_the_task_and_all_below(folder: Store, tmp_path: Path) -> None:
    everything = plan_of(folder)
    commit_all(everything, folder, tmp_path / "x", {task.name for task in everything.tasks} - BELOW_GPTQ)
    assert named(plan_of(folder, start=("gptq",)), "run") == BELOW_GPTQ
    assert named(plan_of(folder, start=("bundle",)), "blocked") >= {"bundle", "deploy"}


def test_an_unknown_selection_lists_the_tasks(folder: Store) -> None:
    with pytest.raises(UserError, match=r"gtpq: no such task or stage.*gptq"):
        plan_of(folder, only=("gtpq",))


@pytest.fixture
def with_files(tmp_path: Path) -> Path:
    """A copy of the tiny recipe with prompt files of its own."""
    data = yaml.safe_load(TINY.read_text())
    data["files"] = {"prompts": [str(TINY.parent / "tiny/prompts.jsonl")], "prompts_a": ["mine.jsonl"]}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(data))
    (tmp_path / "mine.jsonl").write_text('{"id": 1}\n')
    return tmp_path / "recipe.yaml"


def test_local_files_enter_by_content(with_files: Path, folder: Store, tmp_path: Path) -> None:
    def prompts() -> tuple[str, tuple[tuple[Path, str], ...]]:
        task = next(task for task in make_plan(load_recipe(with_files), folder).tasks if task.name == "prompts_a")
        return task.digest, task.files_to_upload

    digest, uploads = prompts()
    assert [path for path, _ in uploads] == [tmp_path / "mine.jsonl"]
    assert uploads[0][1].startswith("_files/")
    assert uploads[0][1].endswith("/mine.jsonl")
    (tmp_path / "mine.jsonl").touch()
    assert prompts() == (digest, uploads)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    shutil.move(tmp_path / "mine.jsonl", moved / "mine.jsonl")
    with_files.write_text(with_files.read_text().replace("mine.jsonl", "elsewhere/mine.jsonl"))
    assert prompts()[0] == digest
    (moved / "mine.jsonl").write_text('{"id": 2}\n')
    assert prompts()[0] != digest


def test_a_missing_file_blocks_what_reads_it_and_all_below(with_files: Path, folder: Store, tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").unlink()
    plan = make_plan(load_recipe(with_files), folder)
    assert why(plan, "prompts_a") == f"{tmp_path / 'mine.jsonl'}: no such file"
    assert why(plan, "regen_a") == "below prompts_a, which is blocked"
    assert named(plan, "run") == {"teacher", "ptq", "prompts_eval", "prompts_b", "measure_baseline"}
    assert plan.obstacles() == [f"prompts_a: {tmp_path / 'mine.jsonl'}: no such file"]


def test_more_prompts_than_the_files_hold_block_the_task(folder: Store) -> None:
    rows = len((TINY.parent / "tiny/prompts.jsonl").read_text().splitlines())
    assert why(plan_of(folder, f"prompts_a.count={rows}"), "prompts_a") == "never run"
    assert why(plan_of(folder, f"prompts_a.count={rows + 1}"), "prompts_a").startswith(f"count {rows + 1}: its files")


def test_artifacts_of_a_stage_are_told_apart_by_the_knobs_above_them(folder: Store, tmp_path: Path) -> None:
    for overrides in ((), ("gptq.damping=0.05",), ("gptq.damping=0.05", "qad.steps=7", "qad.state_every=3")):
        commit_all(plan_of(folder, *overrides), folder, tmp_path / "x")
    steps = yaml.safe_load(TINY.read_text())["qad"]["steps"]
    assert {tuple(row["apart"]) for row in artifacts.rows(folder, "bundle")} == {
        ("gptq.damping=0.01", f"qad.steps={steps}"),
        ("gptq.damping=0.05", f"qad.steps={steps}"),
        ("gptq.damping=0.05", "qad.steps=7"),
    }
    assert [row["apart"] for row in artifacts.rows(folder, "ptq")] == [[]]
    counts = {tuple(fact for fact in row["apart"] if "count" in fact) for row in artifacts.rows(folder, "prompts")}
    assert counts == {
        ("prompts.count=8",),
        ("earlier prompts.count=8", "prompts.count=140"),
        ("earlier prompts.count=140", "earlier prompts.count=8", "prompts.count=24"),
    }


def test_an_int4_checkpoint_takes_the_place_of_ptq(tmp_path: Path, folder: Store) -> None:
    data = yaml.safe_load(TINY.read_text())
    data["int4"] = data["teacher"]
    data.pop("ptq", None)
    data["files"] = {"prompts": [str(TINY.parent / "tiny/prompts.jsonl")]}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(data))
    tasks = {task.name: task for task in build(load_recipe(tmp_path / "recipe.yaml"))}
    assert "ptq" not in tasks
    assert tasks["qad"].inputs["student"] == ("int4",)
    assert tasks["pack"].inputs["student"] == ("int4",)


def test_the_report_needs_no_success_of_the_gate_and_nothing_needs_the_report(folder: Store) -> None:
    tasks = {task.name: task for task in plan_of(folder).tasks}
    assert tasks["report"].soft_needs == ("gate",)
    assert set(tasks["report"].needs) == tasks.keys() - {"gate", "report", "deploy"}
    assert all("report" not in task.needs + task.soft_needs for task in tasks.values())
    assert "gate" in tasks["deploy"].needs


def test_what_is_measured_on_is_kept_out_of_what_is_trained_on(tmp_path: Path) -> None:
    tasks = {task.name: task for task in build(load_recipe(TINY))}
    assert "exclude" not in tasks["prompts_eval"].inputs
    assert tasks["prompts_a"].inputs["exclude"] == ("prompts_eval",)
    assert tasks["prompts_b"].inputs["exclude"] == ("prompts_eval", "prompts_a")
    smol = {task.name: task for task in build(load_recipe(TINY.with_name("smol.yaml")))}
    for name in ("prompts_a", "prompts_b"):
        held_out = smol[name].inputs["held_out"]
        assert held_out == ("prompts_eval", *smol["measure_pair"].inputs["tasks"])
    whole = {task.name: task for task in build(load_recipe(TINY.with_name("qwen3.5-4b-a10g.yaml")))}
    for name in ("prompts_a", "prompts_b"):
        chosen_by = whole["select"].inputs["tasks"]
        assert len(chosen_by) == 4
        assert whole[name].inputs["held_out"] == ("prompts_eval", *whole["measure_pair"].inputs["tasks"], *chosen_by)


@pytest.mark.parametrize(
    ("name", "row", "says"),
    [
        ("piqa.jsonl", {"goal": "x", "sol1": "y", "sol2": "z"}, "piqa.jsonl line 1: no label"),
        ("arc.jsonl", {"goal": "x"}, "arc.jsonl is none of sciq.jsonl, boolq.jsonl, piqa.jsonl, hellaswag.jsonl"),
        ("piqa.jsonl", {"goal": "x", "sol1": "y", "sol2": "z", "label": -1}, "piqa.jsonl line 1: label -1 names none"),
        ("piqa.jsonl", None, "piqa.jsonl is empty"),
        ("boolq.jsonl", {"passage": "p", "question": "q", "label": 1}, None),
    ],
)
def test_rows_that_choose_checkpoints_are_looked_at_before_training(
    folder: Store, tmp_path: Path, name: str, row: dict | None, says: str | None
) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(row) + "\n" if row else "")
    plan = plan_of(folder, f"files.selection={json.dumps([str(path)])}")
    if says is None:
        assert named(plan, "blocked") == set()
    else:
        assert "select" in named(plan, "blocked")
        assert says in why(plan, "select")


def test_a_chat_template_enters_by_the_teacher_alone(folder: Store, tmp_path: Path) -> None:
    own = tmp_path / "own.jinja"
    own.write_text("{% for turn in messages %}{{ turn.role }}: {{ turn.content }}{% endfor %}{{ enable_thinking }}")
    before, after = plan_of(folder), plan_of(folder, f"template.chat_template={own}")
    bound = f"chat_template={folder.url}/_files/{file_sha256(own)}/own.jinja"
    assert [task.name for task in after.tasks if bound in task.argv] == ["teacher"]
    configs = [[task.argv[task.argv.index("--config") + 1] for task in plan.tasks] for plan in (before, after)]
    assert configs[0] == configs[1]
    assert all(one.digest != other.digest for one, other in zip(before.tasks, after.tasks, strict=True))
    assert named(after, "blocked") == set()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"{% for turn in messages %}{{ turn.content }}", "no chat template that works (TemplateSyntaxError: "),
        (b"{{ raise_exception('no ' + messages[0].role) }}", "no chat template that works (TemplateError: no user)"),
        (b"{% if enable_thinking %}{{ 1 / 0 }}{% endif %}{{ messages[0].content }}", "ZeroDivisionError"),
        (b"{% for part in messages[0].content %}{{ part.text }}{% endfor %}", "leaves the question out"),
        (b"caf\xe9 {{ messages[0].content }}", "not UTF-8"),
    ],
)
def test_a_chat_template_that_does_not_work_blocks_the_teacher(
    folder: Store, tmp_path: Path, text: bytes, says: str
) -> None:
    (tmp_path / "own.jinja").write_bytes(text)
    plan = plan_of(folder, f"template.chat_template={tmp_path / 'own.jinja'}")
    assert says in why(plan, "teacher")
    assert str(tmp_path / "own.jinja") in why(plan, "teacher")
    assert len(plan.obstacles()) == 1


def test_prompts_of_other_files_need_no_exclusion_and_a_manifest_is_bound(with_files: Path) -> None:
    data = yaml.safe_load(with_files.read_text())
    data["files"]["manifests"] = {"prompts_b": "ids.txt"}
    with_files.write_text(yaml.safe_dump(data))
    tasks = {task.name: task for task in build(load_recipe(with_files))}
    assert "exclude" not in tasks["prompts_a"].inputs
    assert tasks["prompts_b"].inputs["exclude"] == ("prompts_eval",)
    assert tasks["prompts_b"].inputs["manifest"] == (LocalFile((with_files.parent / "ids.txt").resolve()),)
    assert "manifest" not in tasks["prompts_a"].inputs


def test_the_drafter_learns_beside_qad(folder: Store) -> None:
    tasks = {task.name: task for task in plan_of(folder).tasks}

    def above(name: str) -> set[str]:
        return {one for need in tasks[name].needs for one in {need, *above(need)}}

    assert "qad" not in above("drafter_1")
    assert "drafter_1" not in above("qad")
    assert {"qad", "drafter_1"} <= above("drafter_2")


def test_json_and_table_show_every_task(folder: Store) -> None:
    plan = plan_of(folder)
    document = json.loads(json.dumps(plan.to_json()))
    assert [task["name"] for task in document["tasks"]] == [task.name for task in plan.tasks]
    assert document["tasks"][0].keys() >= {"digest", "state", "why", "role", "argv", "cpu", "memory_gb", "needs"}
    console = Console(width=200, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(render_table(plan))
    text = console.export_text()
    assert all(task.name in text and task.digest[:12] in text for task in plan.tasks)


def test_the_planned_argv_runs_and_is_found_again(folder: Store, home: Path, tmp_path: Path) -> None:
    """The real prompts stage accepts the plan's argv and commits under the digest that the plan foretold."""
    plan = plan_of(folder)
    commit_all(plan, folder, byte_tokenizer(tmp_path / "model"), {"teacher"})
    task = next(task for task in plan.tasks if task.name == "prompts_eval")
    for path, key in task.files_to_upload:
        folder.upload(path, key)
    subprocess.run([sys.executable, *task.argv], check=True, timeout=60)
    after = plan_of(folder)
    assert named(after, "cached") == {"teacher", "prompts_eval"}


def test_a_path_that_looks_like_markup_is_shown_as_it_is(folder: Store) -> None:
    console = Console(record=True, width=200)
    plan = plan_of(folder, "files.prompts=['nowhere/[/b].jsonl']")
    console.print(render_table(plan))
    assert "[/b].jsonl" in console.export_text()
