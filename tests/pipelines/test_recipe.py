from pathlib import Path

import pytest

from components.contract.errors import UserError
from pipelines.recipe import load_recipe
from tests.pipelines.planning import RECIPES, TINY


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_shipped_recipe_loads_and_says_how_it_is_run(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.name == path.stem
    assert path.read_text().startswith(f"# qdflash run pipelines/recipes/{path.name}")


def test_an_override_reaches_the_config() -> None:
    assert load_recipe(TINY, ["qad.steps=7"]).configs["qad"].steps == 7


def test_the_shared_section_is_inherited_and_overridden_field_by_field() -> None:
    recipe = load_recipe(TINY, ["measure.seed=5", "measure_pair.seed=6", "measure.answers.prompts=9"])
    assert recipe.configs["measure_target"].seed == 5
    assert recipe.configs["measure_pair"].seed == 6
    assert recipe.configs["measure_pair"].answers.prompts == 9


def test_the_template_reaches_every_stage_that_has_one() -> None:
    configs = load_recipe(TINY, ["template.thinking=true"]).configs
    with_template = [config for config in configs.values() if "template" in type(config).model_fields]
    assert len(with_template) > 3
    assert all(config.template.thinking for config in with_template)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("qad.stepz=1", "qad.stepz: unknown field, did you mean steps?"),
        ("qadd={}", "qadd: unknown field, did you mean qad?"),
        ("qad=5", "qad: expected a mapping of fields"),
        ("qad.steps=0", "qad.steps: Input should be greater than or equal to 1"),
        ("qad.steps=many", "qad.steps: Input should be a valid integer"),
        ("measure.answers.promptz=1", "measure.answers.promptz: unknown field"),
        ("measure_pair.answers.promptz=1", "measure_pair.answers.promptz: unknown field"),
        ("measure_pair.draft=false", "measure_pair.draft: the pipeline fills this in"),
        ("gate.names=[qad]", "gate.names: the pipeline fills this in"),
        ("regen_a.template={}", "regen_a.template: give the recipe's one template section"),
        ("resources.qad.cpu=0", "resources.qad.cpu: Input should be greater"),
        ("resources.qda.cpu=1", "resources.qda: unknown field, did you mean qad?"),
        ("cluster.images.core=repo/core:latest", "cluster.images.core: an image goes by its digest: registry/"),
        ("cluster.tasks.qda.gpus=1", "cluster.tasks.qda: unknown field, did you mean qad?"),
        ("prompts=7", "prompts: expected a mapping of fields"),
        ("measure=[1, 2]", "measure: expected a mapping of fields"),
        ("deploy.profile=a100", "deploy.profile: a100 is no profile of bundle.serving (cpu, a10g, a10g-"),
        ("name=No Spaces", "name: must match"),
        ("drafter_2.block_size=8", "drafter_2.block_size: 8, but it starts from drafter_1, which has 4; set drafter"),
        ("gptq.group_size=128", "gptq.group_size: 128 does not divide drafter.group_size 32, for which the drafter's"),
        ("name=" + "a" * 58, "name: must match"),  # Argo's Workflow would have 64 characters
        ("name=a..b", "name: must match"),
        ("name=a-", "name: must match"),
        ("resources={1: 2}", "resources.1: unknown field"),
        ("cluster.tasks.qad.cpu=1K", "cluster.tasks.qad.cpu: String should match"),
        ("int4={}", "int4, ptq: give one of the two"),
        ("prompts_a.dataset={id: a/b, revision: " + "a" * 40 + "}", "prompts_a.dataset, files.prompts_a: give one"),
        ("files.prompts=[]", "prompts_b.dataset, files.prompts_b: one of the two says where"),
        ("files.manifests={prompts_c: x}", "files.manifests.prompts_c: unknown field, did you mean prompts_"),
        ("store=s3://bucket", "store: unknown field"),
        ("prompts.count=50", "prompts_a, prompts_b, prompts_eval each give it themselves; set it there"),
        ('files.tasks=["a\\0b"]', "files.tasks.0: holds a character that no file name"),
        ('gate.rules=[{name: "a\\ud800", metric: qad.x, at_least: 1}]', "gate.rules.0.name: holds a character"),
    ],
)
def test_a_wrong_field_is_named_with_its_path_in_one_line(override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(TINY, [override])
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_an_inherited_fault_is_reported_once() -> None:
    with pytest.raises(UserError) as caught:
        load_recipe(TINY, ["measure.seed=x"])
    assert str(caught.value).count("seed") == 1


@pytest.mark.parametrize("override", ["qad.steps", "=3", "qad.steps=[", "name.x=1", "qad.steps=2020-13-45"])
def test_a_malformed_override_is_named(override: str) -> None:
    with pytest.raises(UserError, match="--set"):
        load_recipe(TINY, [override])


def test_a_section_given_twice_is_an_error(tmp_path: Path) -> None:
    recipe = tmp_path / "twice.yaml"
    recipe.write_text("name: twice\nqad: {steps: 1}\nqad: {steps: 2}\n")
    with pytest.raises(UserError, match="qad is given twice"):
        load_recipe(recipe)


@pytest.mark.parametrize(
    "data", [b"- a\n", b"a: [\n", b"", b"\xff\xfe\x00", b"? [a]\n: 1\n", b"&a a: {b: *a}\n", b"x: &x [*x]\n"]
)
def test_a_file_that_is_no_recipe(tmp_path: Path, data: bytes) -> None:
    recipe = tmp_path / "x.yaml"
    recipe.write_bytes(data)
    with pytest.raises(UserError, match=r"x\.yaml"):
        load_recipe(recipe)


def test_yaml_errors_name_file_and_line(tmp_path: Path) -> None:
    recipe = tmp_path / "x.yaml"
    recipe.write_text("name: x\nqad: [\n")
    with pytest.raises(UserError, match=r'in ".*x\.yaml", line 3'):
        load_recipe(recipe)


def test_a_recipe_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        load_recipe(tmp_path / "none.yaml")


def test_placement_of_a_task_overrides_its_role_field_by_field() -> None:
    role, task = "cluster.roles.train={gpus: 1, memory: 64Gi}", "cluster.tasks.qad={gpus: 8}"
    cluster = load_recipe(TINY, [role, task]).cluster
    assert (cluster.placement("qad", "train").gpus, cluster.placement("qad", "train").memory) == (8, "64Gi")
    assert cluster.placement("ptq", "train").gpus == 1
    assert cluster.placement("gate", "core").gpus is None
