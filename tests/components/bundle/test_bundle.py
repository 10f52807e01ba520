import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from components.bundle import stage
from components.bundle.fit import check_fit, drafter_shape
from components.bundle.window import window_of, with_window
from components.contract.context import Input, Inputs, Output
from components.contract.digest import file_sha256
from components.contract.errors import UserError
from components.contract.log import Log
from components.serving.arguments import arguments
from components.serving.profiles import PROFILES as SHIPPED
from components.serving.profiles import Profile, Serving, read_serving
from components.store.artifact import commit
from components.store.backend import Store
from components.store.work import Work

TARGET = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 4, "max_position_embeddings": 4096}
OWN_LAYOUT = {
    "vocab_size": 320,
    "hidden_size": 64,
    "block_size": 4,
    "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 3]},
}
SPECULATORS_LAYOUT = {
    "speculators_model_type": "dflash",
    "aux_hidden_state_layer_ids": [2, 4],
    "mask_token_id": 3,
    "block_size": 4,
    "transformer_layer_config": {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "sliding_window": None},
}
PROFILES = {"cpu", "a10g", "a10g-throughput", "a10g-emulated", "h200"}


def folder(path: Path, config: dict, **files: str) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    for name, text in files.items():
        (path / name.replace("__", ".")).write_text(text)
    return path


def put(store: Store, name: str, made_by: str, source: Path, inputs: dict[str, list[str]]) -> Input:
    manifest = {"version": 1, "config": {"of": name}, "inputs": inputs, "salt": None, "metrics": {}, "versions": {}}
    digest = (made_by.encode().hex() + "0" * 64)[:64]
    return Input(commit(store, made_by, digest, source, manifest)[0].uri)


@pytest.fixture
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Inputs:
    """A target and a drafter committed in a store, above them chats, a model, prompts and one plain file."""
    monkeypatch.setenv("QDFLASH_HOME", str(tmp_path / "home"))
    store = Store(str(tmp_path / "store"))
    lines = tmp_path / "own.jsonl"
    lines.write_text("{}")
    prompts = put(store, "p", "prompts", folder(tmp_path / "p", {}), {"files": [str(lines)]})
    model = put(store, "m", "model", folder(tmp_path / "m", TARGET), {})
    chats = put(store, "c", "regen", folder(tmp_path / "c", {}), {"prompts": [prompts.uri], "model": [model.uri]})
    target_files = folder(
        tmp_path / "t", TARGET, model__safetensors="weights", README__md="the base model's card", census__json="{}"
    )
    target = put(store, "t", "pack", target_files, {"student": [model.uri]})
    draft_files = folder(tmp_path / "d", SPECULATORS_LAYOUT, model__safetensors="draft weights")
    drafter = put(store, "d", "gptq", draft_files, {"chats": [chats.uri], "target": [target.uri]})
    return Inputs({"target": [target], "drafter": [drafter]})


def bundle(pair: Inputs, tmp_path: Path, config: stage.Config | None = None) -> tuple[Path, dict]:
    out = tmp_path / "out"
    out.mkdir()
    work = Work(Store(str(tmp_path / "store")), "_work/bundle/x")
    metrics = stage.run(config or stage.Config(), pair, Output(out, tmp_path, work, Log("bundle")))
    return out, metrics


def test_census_is_the_pair_unchanged_plus_four_files(pair: Inputs, tmp_path: Path) -> None:
    out, metrics = bundle(pair, tmp_path)
    found = {path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file()}
    assert found == {
        "config.json",
        "model.safetensors",
        "census.json",
        "draft/config.json",
        "draft/model.safetensors",
        "serving.yaml",
        "README.md",
        "lineage.json",
        "SHA256SUMS",
    }
    assert metrics["files"] == len(found)
    for port, base in (("target", out), ("drafter", out / "draft")):
        for entry in pair[port].artifact.files:
            if entry["path"] != "README.md":
                assert file_sha256(base / entry["path"]) == entry["sha256"]


def test_the_base_model_s_own_card_is_not_overwritten_in_the_cache(pair: Inputs, tmp_path: Path) -> None:
    out, _ = bundle(pair, tmp_path)
    assert (pair["target"].path / "README.md").read_text() == "the base model's card"
    assert (out / "README.md").read_text().startswith("# qdflash\n")


def test_checksums_hold_by_the_system_s_own_tool(pair: Inputs, tmp_path: Path) -> None:
    out, metrics = bundle(pair, tmp_path)
    checked = subprocess.run(["sha256sum", "-c", "SHA256SUMS"], cwd=out, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert len(checked.stdout.splitlines()) == metrics["files"] - 1


def test_lineage_reaches_the_prompts_and_their_file(pair: Inputs, tmp_path: Path) -> None:
    out, metrics = bundle(pair, tmp_path)
    found = json.loads((out / "lineage.json").read_text())
    assert sorted(entry["stage"] for entry in found["artifacts"].values()) == [
        "gptq",
        "model",
        "pack",
        "prompts",
        "regen",
    ]
    assert metrics["ancestors"] == 5
    assert found["roots"] == {"target": pair["target"].digest, "drafter": pair["drafter"].digest}
    assert found["files"] == {file_sha256(tmp_path / "own.jsonl"): "own.jsonl"}
    for entry in found["artifacts"].values():
        for digests in entry["inputs"].values():
            assert set(digests) <= set(found["artifacts"]) | set(found["files"])
    assert str(tmp_path) not in (out / "lineage.json").read_text()


def test_serving_file_spells_out_what_the_profiles_left_open(pair: Inputs, tmp_path: Path) -> None:
    out, _ = bundle(pair, tmp_path)
    profiles = read_serving(out).profiles
    assert set(profiles) == PROFILES
    assert {profile.num_speculative_tokens for profile in profiles.values()} == {3}
    assert profiles["a10g"].cudagraph_capture_sizes == (1, 4)
    assert profiles["cpu"].cudagraph_capture_sizes is None


def test_no_profile_asks_for_more_than_the_target_knows(pair: Inputs, tmp_path: Path) -> None:
    out, _ = bundle(pair, tmp_path)
    profiles = read_serving(out).profiles
    found = {name: profile.max_model_len for name, profile in profiles.items()}
    assert found == {**dict.fromkeys(PROFILES, 4096), "cpu": 2048}


def test_a_given_profile_is_laid_over_the_shipped_ones(pair: Inputs, tmp_path: Path) -> None:
    given = {"profiles": {"cpu": {"dtype": "float32"}, "own": {"max_num_seqs": 2}}}
    out, _ = bundle(pair, tmp_path, stage.Config(serving=given))
    profiles = read_serving(out).profiles
    assert set(profiles) == PROFILES | {"own"}
    assert (profiles["cpu"].dtype, profiles["cpu"].max_model_len) == ("float32", 2048)
    assert profiles["own"].max_model_len == 4096
    with pytest.raises(ValidationError, match="dtpye"):
        stage.Config(serving={"profiles": {"cpu": {"dtpye": "float32"}}})


def test_card_gives_the_commands_of_its_own_serving_file(pair: Inputs, tmp_path: Path) -> None:
    config = stage.Config(base_model="SomeModel", base_model_licence="Apache-2.0", data="prompts of ours")
    out, _ = bundle(pair, tmp_path, config)
    text = (out / "README.md").read_text()
    assert "SomeModel; licence: Apache-2.0" in text
    assert "prompts of ours; licence: not stated" in text
    serving = read_serving(out)
    for profile in serving.profiles.values():
        import shlex

        assert shlex.join(arguments(profile, ".", "draft", served_model_name=serving.served_model_name)) in text


def test_target_and_drafter_the_wrong_way_round(pair: Inputs, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no 'target_layer_ids'; this is not a DFlash drafter"):
        bundle(Inputs({"target": pair.all("target"), "drafter": pair.all("target")}), tmp_path)
    (tmp_path / "out").rmdir()
    with pytest.raises(UserError, match="no 'vocab_size'; this is not a target"):
        bundle(Inputs({"target": pair.all("drafter"), "drafter": pair.all("drafter")}), tmp_path)


def test_a_config_of_no_fields_is_no_model_folder(tmp_path: Path) -> None:
    for text in ("[]", "null", '"x"'):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match="holds no fields"):
            drafter_shape(tmp_path)


def test_a_full_disk_ends_the_stage_with_one_line_and_no_bundle(
    pair: Inputs, tmp_path: Path, small_disk: Path
) -> None:
    big = put(Store(str(tmp_path / "store")), "b", "big", folder(tmp_path / "b", TARGET, x="0" * (2 << 20)), {})
    command = [sys.executable, "-m", "components.bundle", "--config", "{}", "--input", f"target={big.uri}"]
    command += ["--input", f"drafter={pair['drafter'].uri}", "--output", f"{small_disk}/bundle/"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "disk full" in done.stderr.splitlines()[-1]
    assert list(small_disk.rglob("_manifest.json")) == []


def test_more_drafted_tokens_than_the_block_holds(pair: Inputs, tmp_path: Path) -> None:
    config = stage.Config(serving=Serving(profiles={"cpu": Profile(num_speculative_tokens=4)}))
    with pytest.raises(UserError, match="is 4; the drafter's block size 4 allows at most 3"):
        bundle(pair, tmp_path, config)


def draft_config(out: Path) -> dict:
    return json.loads((out / "draft" / "config.json").read_text())


@pytest.mark.parametrize("window", [8, None])
def test_a_window_changes_the_drafter_s_config_alone(pair: Inputs, tmp_path: Path, window: int | None) -> None:
    before = json.loads((pair["drafter"].path / "config.json").read_text())
    out, metrics = bundle(pair, tmp_path, stage.Config(window=window))
    config = draft_config(out)
    kind = "sliding_attention" if window else "full_attention"
    layer = {"layer_types": [kind] * 2, "sliding_window": window, "use_sliding_window": bool(window)}
    before["transformer_layer_config"] |= layer
    assert config == {**before, "sliding_window_non_causal": True}
    assert metrics["window"] == window
    assert ("attention within 8 tokens" if window else "full attention") in (out / "README.md").read_text()
    assert (out / "draft" / "model.safetensors").read_text() == "draft weights"
    assert json.loads((pair["drafter"].path / "config.json").read_text()) != config, "the input stays as it was"


def test_window_auto_is_the_one_that_was_measured_best(pair: Inputs, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="window is auto"):
        bundle(pair, tmp_path, stage.Config(window="auto"))
    manifest = {"version": 1, "config": {}, "inputs": {}, "salt": None, "versions": {}}
    manifest["metrics"] = {"window": {"chosen": 8, "by_window": {}}}
    measured = commit(Store(str(tmp_path / "store")), "measure", "6" * 64, folder(tmp_path / "w", {}), manifest)[0]
    (tmp_path / "out").rmdir()
    inputs = Inputs({port: [pair[port]] for port in ("target", "drafter")} | {"windows": [Input(measured.uri)]})
    out, _ = bundle(inputs, tmp_path, stage.Config(window="auto"))
    assert draft_config(out)["transformer_layer_config"]["sliding_window"] == 8
    assert "6" * 64 in json.loads((out / "lineage.json").read_text())["artifacts"]


def test_a_window_that_no_block_fits_into_or_of_no_drafter_is_refused(pair: Inputs, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="window 3 is smaller than the drafter's block size 4"):
        bundle(pair, tmp_path, stage.Config(window=3))
    with pytest.raises(UserError, match="not a DFlash drafter"):
        with_window(pair["target"].path, tmp_path / "other", 8)


def test_the_public_drafters_layout_takes_a_window_and_stays_non_causal(tmp_path: Path) -> None:
    own = {**OWN_LAYOUT["dflash_config"], "use_swa": True, "swa_window_size": 16, "causal": True}
    public = folder(tmp_path / "public", {**OWN_LAYOUT, "num_hidden_layers": 2, "dflash_config": own})
    assert window_of(public) == 16
    for window in (8, None):
        with_window(public, tmp_path / str(window), window)
        config = json.loads((tmp_path / str(window) / "config.json").read_text())
        assert window_of(tmp_path / str(window)) == window
        assert config["is_causal"] is False
        assert config["dflash_config"] == OWN_LAYOUT["dflash_config"]


def test_the_emulated_a10g_takes_as_much_of_an_h200_as_the_real_profile_of_an_a10g() -> None:
    a10g, emulated = (SHIPPED[name].gpu_memory_utilization for name in ("a10g", "a10g-emulated"))
    assert emulated * 143771 == pytest.approx(a10g * 23028, rel=1e-3)


@pytest.mark.parametrize("layout", [OWN_LAYOUT, SPECULATORS_LAYOUT])
def test_both_layouts_give_the_same_shape(tmp_path: Path, layout: dict) -> None:
    shape = check_fit(folder(tmp_path / "t", {"text_config": TARGET}), folder(tmp_path / "d", layout))
    assert (shape.vocabulary, shape.hidden_size, shape.taps, shape.mask_token, shape.block_size) == (
        320,
        64,
        (1, 3),
        3,
        4,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 321}, "vocabulary 321, the target's is 320"),
        ({"hidden_size": 128}, "hidden size 128, the target's is 64"),
        ({"dflash_config": {"mask_token_id": 320, "target_layer_ids": [1]}}, "mask token 320 .* of 320"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 4]}}, r"taps \[4\] outside .* 0 to 3"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 1]}}, r"taps \[1, 1\] are not distinct"),
        ({"dflash_config": {}}, "not a DFlash drafter"),
        ({"dflash_config": None}, "not a DFlash drafter"),
        ({"dflash_config": {"mask_token_id": None, "target_layer_ids": [1]}}, "None.*not a DFlash drafter"),
        ({"dflash_config": {"mask_token_id": 3, "target_layer_ids": 1}}, "not a DFlash drafter"),
        ({"block_size": "4"}, "'4'.*not a DFlash drafter"),
        ({"block_size": 1}, "block size 1 leaves nothing to draft"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_with_the_numbers(tmp_path: Path, change: dict, message: str) -> None:
    target = folder(tmp_path / "t", TARGET)
    draft = folder(tmp_path / "d", {**OWN_LAYOUT, **change})
    with pytest.raises(UserError, match=message):
        check_fit(target, draft)
