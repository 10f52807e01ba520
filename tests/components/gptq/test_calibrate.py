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
