import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import log_softmax
from transformers import Gemma3TextConfig, GPT2Config, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from components.contract.errors import UserError
from components.drafter import model
from components.drafter.blocks import Blocks, decay, lay_out
from components.drafter.features import TargetFeatures, target_layer_ids
from components.drafter.forward import block_hidden, predictions
from components.drafter.loss import Objective
from tests.components.tiny_models import HYBRID


def at(*anchors: int, tokens: torch.Tensor | None = None) -> Blocks:
    return lay_out([(TOKENS if tokens is None else tokens, torch.tensor(anchors))], 4)


ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
DEEP_HYBRID = Qwen3_5TextConfig(
    **{**HYBRID, "num_hidden_layers": 4, "layer_types": HYBRID["layer_types"] * 2}, rope_parameters=ROPE
)
TOKENS = torch.tensor([1, 40, 50, 60, 70, 80, 90, 100, 110, 120, 2])


def test_tapped_layers_follow_the_published_rule():
    assert target_layer_ids(32, 5) == [1, 8, 15, 22, 29]
    assert target_layer_ids(30, 1) == [15]
    assert target_layer_ids(4, 1) == [2]


def test_features_are_the_hidden_states_after_the_tapped_layers(target):
    taken = TargetFeatures(target, [0, 2])(TOKENS)
    with torch.no_grad():
        states = target(input_ids=TOKENS[None], output_hidden_states=True).hidden_states
    assert torch.equal(taken, torch.cat([states[1][0], states[3][0]], dim=-1))


def test_the_target_stops_at_the_last_tap(target):
    ran = []
    hook = target.get_decoder().layers[3].register_forward_hook(lambda *_: ran.append(1))
    TargetFeatures(target, [0, 2])(TOKENS)
    hook.remove()
    assert not ran


def test_blocks_run_together_equal_each_block_run_alone_on_its_prefix(drafter, target):
    """The mask and the positions: a block alone, with only the context before its anchor, needs no mask at all."""
    features = TargetFeatures(target, [0, 2])(TOKENS)
    anchors = [3, 5, 9]
    together = block_hidden(drafter, features, at(*anchors))
    for index, anchor in enumerate(anchors):
        slots = torch.tensor([[int(TOKENS[anchor]), 3, 3, 3]])
        context = drafter.hidden_norm(drafter.fc(features[:anchor]))[None]
        hidden = drafter.embed_tokens(slots)
        rotary = drafter.rotary_emb(hidden, torch.arange(anchor + 4)[None])
        for layer in drafter.layers:
            hidden = layer(
                hidden_states=hidden, target_hidden=context, attention_mask=None, position_embeddings=rotary
            )
        torch.testing.assert_close(together[index], drafter.norm(hidden)[0], rtol=1e-4, atol=1e-5)


def test_a_block_depends_on_nothing_at_or_after_its_anchor(drafter, target):
    features = TargetFeatures(target, [0, 2])(TOKENS)
    changed = features.clone()
    changed[5:] += 1.0
    before = block_hidden(drafter, features, at(5))
    assert torch.equal(before, block_hidden(drafter, changed, at(5)))
    changed[4] += 1.0
    assert not torch.equal(before, block_hidden(drafter, changed, at(5)))


def test_the_loss_is_the_float64_formula(drafter, target):
    features = TargetFeatures(target, [0, 2])(TOKENS)
    blocks, gamma = at(4, 8), 3.0
    loss = Objective(drafter, gamma)(features, blocks)
    hidden = block_hidden(drafter, features, blocks).double()
    expected, weights = 0.0, 0.0
    for block, anchor in enumerate([4, 8]):
        for slot in range(1, 4):
            if anchor + slot < len(TOKENS):
                weight = float(torch.exp(torch.tensor(-(slot - 1) / gamma, dtype=torch.float64)))
                logits = hidden[block, slot] @ drafter.lm_head.weight.double().T
                expected -= weight * float(log_softmax(logits, -1)[TOKENS[anchor + slot]])
                weights += weight
    torch.testing.assert_close(float(loss), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(Objective(drafter, gamma).weight(blocks), weights, rtol=1e-6, atol=1e-6)
    assert decay(torch.ones(1, 3, dtype=torch.bool), gamma)[0, 0] == 1


def test_the_kl_loss_is_the_float64_formula_of_the_target_s_own_logits(target):
    """Slot k is compared with what the target itself says after the token before it, over the drafted tokens."""
    torch.manual_seed(0)
    kept = torch.tensor([2, 40, 50, 60, 200])
    for drafted in (None, kept):
        drafter = model.attach(
            model.build(target.config, layers=1, taps=[0, 2], block_size=4, mask_token=3, draft_tokens=drafted), target
        )
        features = TargetFeatures(target, [0, 2], final=True)(TOKENS)
        blocks, gamma = at(4, 8), 3.0
        loss = Objective(drafter, gamma, "kl")(features, blocks)
        hidden = block_hidden(drafter, features[:, : drafter.fc.in_features], blocks).double()
        with torch.no_grad():
            whole = target(input_ids=TOKENS[None]).logits[0].double()
        rows = slice(None) if drafted is None else drafted
        expected = 0.0
        for block, anchor in enumerate([4, 8]):
            for slot in range(1, 4):
                if anchor + slot < len(TOKENS):
                    wanted = log_softmax(whole[anchor + slot - 1, rows], -1)
                    given = log_softmax(hidden[block, slot] @ drafter.lm_head.weight.double().T, -1)
                    weight = torch.exp(torch.tensor(-(slot - 1) / gamma, dtype=torch.float64))
                    expected += float(weight * (wanted.exp() * (wanted - given)).sum())
        torch.testing.assert_close(float(loss), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "trimmed"), [("cross_entropy", True), ("d_pace", False), ("kl", True)])
def test_a_forward_and_its_gradient_ask_the_device_for_no_value(kind, trimmed, monkeypatch):
    """A GPU would be waited for. Tensors on the meta device have no values to give."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _device: False)  # it does not know this device
    target = Qwen3_5ForCausalLM(DEEP_HYBRID).eval()
    kept = torch.arange(2, 120) if trimmed else None
    drafter = model.build(
        target.config, layers=2, taps=[0, 2], block_size=4, mask_token=3, window=6, draft_tokens=kept
    )
    objective = Objective(model.attach(drafter, target), 7.0, kind)
    target.to("meta"), drafter.to("meta")
    blocks = lay_out([(TOKENS, torch.tensor([4, 8])), (TOKENS[:7], torch.tensor([1]))], 4)
    compute = TargetFeatures(target, [0, 2], final=kind == "kl")
    features = torch.cat([compute(TOKENS), compute(TOKENS[:7])])
    assert features.device.type == "meta"
    objective(features, blocks).backward()
    assert all(weight.grad is not None for weight in model.trained_parameters(drafter).values())


def test_positions_that_are_given_are_those_that_the_target_takes_itself():
    torch.manual_seed(0)
    target = Qwen3_5ForCausalLM(DEEP_HYBRID).eval()
    with torch.no_grad():
        states = target(input_ids=TOKENS[None], output_hidden_states=True).hidden_states
    assert torch.equal(TargetFeatures(target, [0, 2])(TOKENS), torch.cat([states[1][0], states[3][0]], dim=-1))


def test_a_trimmed_vocabulary_drafts_target_ids_and_survives_the_file(target, tmp_path):
    torch.manual_seed(0)
    kept = torch.tensor([2, 40, 50, 60, 200])
    drafter = model.attach(
        model.build(target.config, layers=1, taps=[0, 2], block_size=4, mask_token=3, draft_tokens=kept), target
    )
    head = target.get_output_embeddings().weight
    assert torch.equal(drafter.lm_head.weight, head[kept])
    features = TargetFeatures(target, [0, 2])(TOKENS)
    drafted = predictions(drafter, features, at(3, 6))
    hidden = block_hidden(drafter, features, at(3, 6))[:, 1:]
    assert torch.equal(drafted, kept[(hidden @ head[kept].T).argmax(-1)])
    model.save(drafter, tmp_path)
    again = model.attach(model.read(tmp_path), target)
    model.load_weights(again, tmp_path)
    assert torch.equal(again.d2t, drafter.d2t)
    for name, weight in model.trained_parameters(again).items():
        assert torch.equal(weight, drafter.get_parameter(name).bfloat16().float())
    unknown = at(4, tokens=torch.tensor([1, *[9] * 10]))
    outside = Objective(drafter, 7.0)(features, unknown)
    assert float(outside) == 0


def test_a_public_drafter_s_layout_is_read(drafter, target, tmp_path):
    """Their config is a Qwen3 model's with ``dflash_config``; names of tensors are the same."""
    model.save(drafter, tmp_path)
    file = tmp_path / "config.json"
    layer = json.loads(file.read_text())["transformer_layer_config"]
    kept = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    public = {
        name: layer[name] for name in (*kept, "head_dim", "rms_norm_eps", "vocab_size", "max_position_embeddings")
    }
    public |= {"architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}}
    public |= {"model_type": "qwen3", "rope_theta": 10000.0, "rope_scaling": None, "num_target_layers": 4}
    public |= {"block_size": 4, "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2]}, "dtype": "bfloat16"}
    assert layer["rope_parameters"]["rope_theta"] == public["rope_theta"]
    features, hidden = TargetFeatures(target, [0, 2])(TOKENS), []
    for document in (None, public):
        if document:
            file.write_text(json.dumps(document))
        again = model.attach(model.read(tmp_path), target)
        model.load_weights(again, tmp_path)
        assert model.taps_of(again) == [0, 2]
        assert model.window_of(again) is None
        hidden.append(block_hidden(again, features, at(3, 5)))
    assert torch.equal(*hidden)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2Config(), "a gpt2 model has no num_key_value_heads, intermediate_size, rms_norm_eps, rope_theta"),
        (Gemma3TextConfig(), "a gemma3_text model has no rope_theta"),
    ],
)
def test_a_target_of_another_kind_is_refused(config, message):
    with pytest.raises(UserError, match=message):
        model.build(config, layers=1, taps=[1], block_size=4, mask_token=3)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"dflash_config": {}},
        {"dflash_config": 3},
        {"speculators_model_type": "dflash", "block_size": "x"},
        {"hidden_size": 8, "num_attention_heads": 0, "head_dim": 8, "vocab_size": 9, "num_hidden_layers": 1}
        | {"block_size": 4, "dflash_config": {"target_layer_ids": [0], "mask_token_id": 3}},
        {"hidden_size": 8, "num_attention_heads": 1, "head_dim": 8, "vocab_size": 9, "num_hidden_layers": 1}
        | {"block_size": 4, "dflash_config": {"target_layer_ids": [0], "mask_token_id": None}},
    ],
)
def test_a_config_that_is_no_drafter_s_is_refused(document, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(document))
    with pytest.raises(UserError, match="not a DFlash drafter's"):
        model.read(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample_from_anchor": True}, "its anchors predict too"),
        ({"transformer_layer_config": {"layer_types": ["full_attention", "sliding_attention"]}}, "layers of several"),
    ],
)
def test_a_drafter_whose_blocks_are_other_than_ours_is_refused(change, message, drafter, tmp_path):
    model.save(drafter, tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    layer = document["transformer_layer_config"] | change.pop("transformer_layer_config", {})
    layer |= {"sliding_window": 8, "use_sliding_window": True}
    (tmp_path / "config.json").write_text(json.dumps(document | change | {"transformer_layer_config": layer}))
    with pytest.raises(UserError, match=message):
        model.read(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("norm.weight", lambda weight: weight[:5].clone(), r"norm\.weight is \[5\], not"),
        ("norm.weight", lambda weight: weight * float("nan"), r"norm\.weight holds values that are not finite"),
        ("norm.weight", None, r"tensors missing or unknown: norm\.weight"),
        ("d2t", lambda offsets: offsets.flip(0), "t2d and d2t name no 5 tokens, in their order"),
        ("d2t", lambda offsets: offsets[:4].clone(), "t2d and d2t name no 5 tokens, in their order"),
        ("t2d", lambda kept: kept[:300].clone(), "t2d and d2t name no 5 tokens, in their order"),
        ("t2d", None, "no tensor t2d"),
    ],
)
def test_a_folder_whose_tensors_are_not_the_drafter_s_is_refused(name, change, message, target, tmp_path):
    kept = torch.tensor([2, 40, 50, 60, 200])
    built = model.build(target.config, layers=1, taps=[0, 2], block_size=4, mask_token=3, draft_tokens=kept)
    model.save(model.attach(built, target), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    old = tensors.pop(name)
    save_file(tensors | ({name: change(old)} if change else {}), tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        model.load_weights(model.read(tmp_path), tmp_path)


@pytest.mark.parametrize(
    "damage", [lambda file: file.unlink(), lambda file: file.write_bytes(file.read_bytes()[:999])]
)
def test_a_folder_whose_file_is_gone_or_torn_is_refused(damage, drafter, tmp_path):
    model.save(drafter, tmp_path)
    damage(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"no \*\.safetensors|truncated or not a safetensors file"):
        model.load_weights(drafter, tmp_path)
