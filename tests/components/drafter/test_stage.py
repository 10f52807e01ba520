import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from components.checkpoint.load import load_model
from components.contract.errors import UserError
from components.drafter import model, stage
from tests.components.drafter.runs import run


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("QDFLASH_HOME", str(tmp_path / "home"))


def test_features_computed_once_or_each_time_train_the_same_drafter(tmp_path, tiny_model, chats):
    cached, first, log = run(tmp_path, tiny_model, chats, "cached")
    online, second, _ = run(tmp_path, tiny_model, chats, "online", cache_features=False)
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert (first / "curve.jsonl").read_text() == (second / "curve.jsonl").read_text()
    assert cached == online
    assert cached["steps"] in (3, 4)
    assert "what=features" in log
    assert f"progress done=1 total={cached['steps']} what=steps" in log


def test_the_best_evaluation_is_the_one_handed_on(tmp_path, tiny_model, chats):
    metrics, path, _ = run(tmp_path, tiny_model, chats, epochs=3, learning_rate=3e-3, evaluate_every=2)
    scores = json.loads((path / "scores.json").read_text())
    trained = [entry for entry in scores["evaluations"] if entry["step"]]
    best = max(trained, key=lambda entry: entry["accept_length"]["value"])
    assert (metrics["best_step"], scores["final"]) == (best["step"], best["accept_length"])
    assert scores["untrained"] == scores["init"] == scores["evaluations"][0]["accept_length"]


def test_best_weights_that_were_damaged_are_not_handed_on(tmp_path, tiny_model, chats):
    """At this learning rate no evaluation is better than the first, whose weights the second run does not write."""
    settings = {"learning_rate": 1e-9, "evaluate_every": 1}
    metrics, _, _ = run(tmp_path, tiny_model, chats, "one", **settings)
    assert metrics["best_step"] == 1
    (stored,) = (tmp_path / "store/_work/d/one/folders").rglob("weights.safetensors")
    data = bytearray(stored.read_bytes())
    data[-9] ^= 1
    stored.write_bytes(data)
    with pytest.raises(UserError, match="the weights of step 1 are gone or damaged; remove it and run again"):
        run(tmp_path, tiny_model, chats, "one", path="again", **settings)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"group_size": 48}, "group_size 48 does not divide"),
        ({"mask_token": 10}, "mask_token 10: it can occur"),
        ({"taps": 3}, "a target of 4 layers has no 3 distinct ones"),
        ({"draft_vocabulary": 320}, "the target has 320 tokens"),
        ({"held_out": 1e-9}, "0 held out"),
        ({"heads": 2, "key_value_heads": 4}, "drafter.key_value_heads: 4 do not divide 2 heads"),
    ],
)
def test_what_cannot_train_is_refused_in_one_line(tmp_path, tiny_model, chats, config, message):
    with pytest.raises(UserError, match=message):
        run(tmp_path, tiny_model, chats, **config)


def in_speculators_layout(folder, target, tmp_path):
    """As speculators' own trainer saves it; by default its windows are causal, which slots of a block are not."""
    drafter = model.attach(model.read(folder), load_model(target, torch.float32))
    model.load_weights(drafter, folder)
    drafter.config.sliding_window_non_causal = False
    drafter.save_pretrained(tmp_path / "speculators")
    return tmp_path / "speculators"


def in_public_layout(folder, target, tmp_path):
    """As public drafters are published: a Qwen3 model's config with ``dflash_config``."""
    shutil.copytree(folder, tmp_path / "public")
    document = json.loads((folder / "config.json").read_text())
    public = document["transformer_layer_config"] | {"model_type": "qwen3", "tie_word_embeddings": True}
    public |= {"architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}
    dflash = {"mask_token_id": document["mask_token_id"], "target_layer_ids": [2]}
    public |= {"block_size": document["block_size"], "dflash_config": dflash, "num_target_layers": 4}
    (tmp_path / "public/config.json").write_text(json.dumps(public))
    return tmp_path / "public"


@pytest.mark.slow
def test_a_second_stage_begins_anew_from_a_drafter_in_any_of_three_layouts(tmp_path, tiny_model, chats):
    settings = {"epochs": 2, "learning_rate": 3e-3, "window": 8}
    first, ours, _ = run(tmp_path, tiny_model, chats, "first", **settings)
    known = ours, *(layout(ours, tiny_model, tmp_path) for layout in (in_speculators_layout, in_public_layout))
    found = [run(tmp_path, tiny_model, chats, f"from {one.name}", init=one, **settings) for one in known]
    for metrics, path, _ in found:
        assert metrics["steps"] == first["steps"]
        assert metrics["accept_length"]["init"]["value"] == pytest.approx(
            first["accept_length"]["final"]["value"], abs=0.02
        )
        assert (path / "model.safetensors").read_bytes() == (found[0][1] / "model.safetensors").read_bytes()
        config = json.loads((path / "config.json").read_text())
        assert (
            config["transformer_layer_config"]
            == json.loads((ours / "config.json").read_text())["transformer_layer_config"]
        )
        assert config["sliding_window_non_causal"] is True
    assert (found[0][1] / "model.safetensors").read_bytes() != (ours / "model.safetensors").read_bytes()
    for change, message in (
        ({"block_size": 8}, "drafter.block_size 8: the initial drafter has 4"),
        ({"window": None}, "drafter.window None: the initial drafter has 8"),
        ({"head_dim": 16}, "drafter.head_dim 16: the initial drafter has 32"),
    ):
        with pytest.raises(UserError, match=message):
            run(tmp_path, tiny_model, chats, f"another {'-'.join(change)}", init=ours, **settings | change)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"block_size": 16, "window": 8}, "slots would not see each other"),
        ({"epochs": 0}, "epochs\n.* greater than or equal to 1"),
        ({"head_dim": 33}, "head_dim\n.* multiple of 2"),
    ],
)
def test_what_no_chats_can_train_is_refused_before_anything_starts(config, message):
    with pytest.raises(ValueError, match=message):
        stage.Config(**config)


def test_a_target_with_a_value_that_is_no_number_is_refused(tmp_path, tiny_model, chats):
    shutil.copytree(tiny_model, tmp_path / "target")
    tensors = load_file(tiny_model / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, tmp_path / "target/model.safetensors")
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight holds values that are not finite"):
        run(tmp_path, tmp_path / "target", chats)


def test_an_initial_drafter_is_looked_at_before_features_are_computed(tmp_path, tiny_model, chats):
    _, ours, _ = run(tmp_path, tiny_model, chats, "ours")
    tensors = load_file(ours / "model.safetensors")
    del tensors["fc.weight"]
    save_file(tensors, ours / "model.safetensors")
    with pytest.raises(UserError, match=r"tensors missing or unknown: fc\.weight"):
        run(tmp_path, tiny_model, chats, "second", init=ours)
    assert not list((tmp_path / "store/_work/d/second").rglob("features"))


def test_micro_batches_split_the_same_gradient(tmp_path, tiny_model, chats):
    one, first, _ = run(tmp_path, tiny_model, chats, "one", loss="d_pace")
    two, second, _ = run(tmp_path, tiny_model, chats, "two", loss="d_pace", micro_batch=7)
    assert one["steps"] == two["steps"] > 1
    assert_same_training(first, second)


@pytest.mark.slow
def test_two_processes_equal_one(tmp_path, tiny_model, chats):
    """Also of a batch that two do not divide. The noise is that of the order in which fp32 gradients are added."""
    settings = {"save_every": 4, "evaluate_every": 2, "loss": "kl", "batch": 15, "micro_batch": 2}
    one, first, _ = run(tmp_path, tiny_model, chats, "one", **settings)
    two, second, _ = run(tmp_path, tiny_model, chats, "two", **settings, processes=2)
    assert one["steps"] == two["steps"] > 2
    assert_same_training(first, second)


def assert_same_training(one, other):
    curves = [[json.loads(line) for line in (folder / "curve.jsonl").open()] for folder in (one, other)]
    for ours, theirs in zip(*curves, strict=True):
        assert ours.keys() == theirs.keys()
        if "loss" in ours:
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (one, other))
    apart = torch.cat([(ours[name] - theirs[name]).float().flatten() for name in ours])
    whole = torch.cat([ours[name].float().flatten() for name in ours])
    assert apart.norm() / whole.norm() < 1e-3
