import pytest
import torch

from components.contract.errors import UserError
from components.drafter.data import Chat
from components.drafter.features import TargetFeatures
from components.gptq.calibrate import Calibration, choose, draw
from components.gptq.sequence import parts

TOKENS = torch.tensor([1, 40, 50, 60, 70, 80, 90, 100, 110, 120, 2])
CHATS = [Chat("a", TOKENS, 4), Chat("b", TOKENS[:8], 3)]


def test_hessians_are_twice_the_second_moments_of_what_each_linear_sees(drafter, target):
    compute = TargetFeatures(target, [0, 2])
    features = [compute(chat.token_ids) for chat in CHATS]
    calibration = Calibration(CHATS, features.__getitem__, 3, torch.float32)
    linears = {name: linear for part in parts(drafter) for name, linear in part.items()}
    found = calibration.hessians(drafter, linears)
    assert calibration.blocks == 6

    context = torch.cat(features).double()
    torch.testing.assert_close(found["fc"].double(), 2 * context.T @ context, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        # the first layer: slot inputs do not depend on the context, so they can be written down
        anchors = [4, 6, 9, 3, 4, 6]  # over 4 … 9 and 3 … 6, both ends and the rounded middle
        ids = torch.tensor([[int(TOKENS[a]), 3, 3, 3] for a in anchors]).flatten()
        slots = drafter.layers[0].input_layernorm(drafter.embed_tokens(ids)).double()
        seen = drafter.hidden_norm(drafter.fc(torch.cat(features))).double()
    query, key = 2 * slots.T @ slots, 2 * (slots.T @ slots + seen.T @ seen)
    torch.testing.assert_close(found["layers.0.self_attn.q_proj"].double(), query, rtol=1e-4, atol=1e-3)
    for name in ("k_proj", "v_proj"):
        torch.testing.assert_close(found[f"layers.0.self_attn.{name}"].double(), key, rtol=1e-4, atol=1e-3)


def test_hessians_are_summed_in_float32_where_the_drafter_runs_in_bfloat16(drafter, target):
    features = [TargetFeatures(target, [0, 2])(chat.token_ids) for chat in CHATS]
    seen, linears = [], {"fc": drafter.fc}
    hook = drafter.fc.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0]))
    found = Calibration(CHATS, features.__getitem__, 3, torch.bfloat16).hessians(drafter, linears)["fc"]
    hook.remove()
    rows = torch.cat([one.flatten(0, -2) for one in seen])
    wanted = 2 * rows.double().T @ rows.double()
    assert (found.double() - wanted).norm() < 1e-5 * wanted.norm()


def test_a_forward_of_all_blocks_sees_what_one_for_each_anchor_sees(drafter, target):
    """The training mask: a block sees its own prefix, no other block, and the context enters once."""
    compute = TargetFeatures(target, [0, 2])
    features = [compute(chat.token_ids) for chat in CHATS]
    linears = {name: linear for part in parts(drafter)[1:] for name, linear in part.items()}
    together = Calibration(CHATS, features.__getitem__, 3, torch.float32).hessians(drafter, linears)
    apart = []
    for index, anchor in [(0, 4), (0, 6), (0, 9), (1, 3), (1, 4), (1, 6)]:
        chat = Chat(f"{index}/{anchor}", CHATS[index].token_ids[: anchor + 2], anchor)
        alone = Calibration([chat], lambda _, index=index, end=anchor + 2: features[index][:end], 1, torch.float32)
        assert alone.blocks == 1
        apart.append(alone.hessians(drafter, linears))
    for name in linears:
        every = sum(one[name] for one in apart)
        if name.endswith(("k_proj", "v_proj")):  # the only ones that read the context, each time again
            assert (every.diagonal() > together[name].diagonal()).all()
        else:
            torch.testing.assert_close(together[name], every, rtol=1e-3, atol=1e-3)


def test_the_choice_of_conversations_depends_on_ids_not_on_their_order():
    chats = [Chat(f"row-{i}", TOKENS, 4) for i in range(20)]
    chosen = choose(chats, 8)
    assert chosen == choose(chats[::-1], 8)
    assert [chat.id for chat in chosen] != [f"row-{i}" for i in range(8)]


def test_the_mix_is_exactly_what_was_asked_or_refused():
    chats = [Chat(f"row-{i}", TOKENS, 4) for i in range(30)]
    category = {f"row-{i}": "code" if i % 3 == 0 else "math" for i in range(30)}
    chosen = draw(chats, 9, {"code": 7, "math": 2}, category)
    assert sorted(category[chat.id] for chat in chosen) == ["code"] * 7 + ["math"] * 2
    assert chosen == draw(chats[::-1], 9, {"math": 2, "code": 7}, category)
    assert draw(chats, 9, {}, category) == choose(chats, 9)
    with pytest.raises(UserError, match="10 usable rows of category code, 11 are to calibrate on"):
        draw(chats, 13, {"code": 11, "math": 2}, category)
    with pytest.raises(UserError, match="30 usable rows, 31 are"):
        draw(chats, 31, {}, category)
