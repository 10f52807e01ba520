import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from components.checkpoint.config import read_config
from components.checkpoint.grid import iterate_grid, read_grid
from components.checkpoint.load import load_model
from components.checkpoint.tensors import Tensors
from components.checkpoint.unpack import passthrough_tensors
from components.contract.errors import UserError
from components.contract.log import Log
from components.pack.latents import Latents
from components.pack.proof import held_out_pieces, logit_difference, prove_tensors
from components.pack.stage import Config
from components.pack.target import write_target
from components.sequences.reader import read_index
from tests.components.pack.conftest import MTP, PROCESSORS, pack, train
from tests.components.qad.conftest import random_sequences


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_untouched_checkpoint_comes_back_bit_for_bit(student: Path, model: Path, tmp_path: Path, dtype):
    folder, metrics = pack(train(student, tmp_path / "s", 0.0, dtype), student, model, tmp_path)
    assert metrics["codes_changed"] == 0
    before, after = load_file(student / "model.safetensors"), load_file(folder / "model.safetensors")
    assert set(before) == set(after)
    assert all(after[name].dtype == before[name].dtype and torch.equal(after[name], before[name]) for name in before)


def test_trained_codes_are_served_and_everything_else_is_the_students(student: Path, model: Path, tmp_path: Path):
    selected = train(student, tmp_path / "s", 0.4)
    folder, metrics = pack(selected, student, model, tmp_path, proof_tokens=100)
    latents, before, after = load_file(selected / "latents.safetensors"), read_grid(student), read_grid(folder)
    assert set(before) == set(after)
    changed = total = 0
    for name, quantized in after.items():
        assert torch.equal(quantized.scales, before[name].scales)
        if name != MTP:
            wide = quantized.scales.float().repeat_interleave(quantized.group_size, 1)
            assert torch.equal(
                quantized.codes.float(), (latents[f"{name}.weight"].float() / wide).round().clamp(-8, 7)
            )
        changed += int((quantized.codes != before[name].codes).sum())
        total += quantized.codes.numel()
    assert metrics["codes_changed"] == pytest.approx(changed / total, rel=1e-6)
    assert 0.1 < metrics["codes_changed"] < 0.4
    assert (metrics["kl"], metrics["max_logit_difference"], metrics["proof_tokens"]) == (0, 0, 128)
    assert metrics["carried"] == (MTP in before)
    source, written = Tensors(student), Tensors(folder)
    for name, tensor in passthrough_tensors(source):
        assert torch.equal(written[name], tensor)
    norm = next(name for name in source if name.endswith("layers.0.input_layernorm.weight"))
    assert (Tensors(model)[norm] * 1.5 == written[norm]).all()
    census = json.loads((folder / "census.json").read_text())
    assert set(census["quantized"]) == set(after)
    text = {name.replace("model.language_model.", "model.") for name in census["dense"]}
    assert set(read_config(folder)["quantization_config"]["ignore"]) == text | set(census["dense"])
    assert set(census["unchanged"]) == {name for name, _ in passthrough_tensors(source)}
    sidecars = {path.name: path.read_bytes() for path in model.iterdir()}
    sidecars = {name: data for name, data in sidecars.items() if name not in ("config.json", "model.safetensors")}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"} < set(sidecars)
    assert (set(PROCESSORS) < set(sidecars)) == ("multimodal" in model.name)
    assert all((folder / name).read_bytes() == data for name, data in sidecars.items())
    load_model(folder)


def test_the_chosen_checkpoint_alone_is_fetched_and_only_of_its_own_qad(student: Path, model: Path, tmp_path: Path):
    latents = train(student, tmp_path / "s", 0.0)
    pack(latents, student, model, tmp_path)
    sizes = {path.stat().st_size for path in (tmp_path / "home/cache/blobs").iterdir()}
    assert (latents / "latents.safetensors").stat().st_size in sizes
    assert len("not read") not in sizes
    (tmp_path / "other").mkdir()
    with pytest.raises(UserError, match="chose among the checkpoints of qad/7"):
        pack(latents, student, model, tmp_path / "other", of="7")


def damage(folder: Path, change) -> None:
    tensors = load_file(folder / "latents.safetensors")
    change(tensors)
    save_file(tensors, folder / "latents.safetensors")


def name_of(folder: Path) -> str:
    return next(
        n.removesuffix(".weight") for n in load_file(folder / "latents.safetensors") if "gate_proj.weight" in n
    )


def drop(tensors: dict, name: str) -> None:
    del tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"]


def nudge(tensors: dict, name: str) -> None:
    tensors[f"{name}.weight_scale"][5, -1] *= 1.01


def spoil(tensors: dict, name: str) -> None:
    tensors[f"{name}.weight"][5, 1] = float("nan")


def halve(tensors: dict, name: str) -> None:
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].half()


def transpose(tensors: dict, name: str) -> None:
    tensors[f"{name}.weight"] = tensors[f"{name}.weight"].T.contiguous()


def invent(tensors: dict, name: str) -> None:
    tensors |= {"odd.weight": torch.ones(2, 32), "odd.weight_scale": torch.ones(2, 1)}


def orphan(tensors: dict, name: str) -> None:
    del tensors[f"{name}.weight_scale"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop, "no latents of .*gate_proj"),
        (nudge, "gate_proj: scales differ from the student's"),
        (spoil, "gate_proj: latents hold NaN"),
        (halve, "gate_proj: latents are torch.float16"),
        (transpose, "gate_proj: latents are .* do not fit"),
        (invent, "odd is not quantised in"),
        (orphan, "gate_proj.weight_scale: every module needs"),
    ],
)
def test_refuses_latents_that_are_not_of_this_grid(
    latents: Path, student: Path, model: Path, tmp_path, change, message
):
    name = name_of(latents)
    damage(latents, lambda tensors: change(tensors, name))
    with pytest.raises(UserError, match=message):
        pack(latents, student, model, tmp_path)


@pytest.fixture
def target(latents: Path, student: Path, model: Path, tmp_path: Path) -> tuple[Path, Latents]:
    """A packed target, before its proof."""
    trained = write_target(student, latents, model, tmp_path / "target", Log("pack"))
    return tmp_path / "target", trained


@pytest.mark.parametrize(
    ("suffix", "message"),
    [
        ("gate_proj.weight_scale", "weight_scale is not the student's bytes"),
        ("gate_proj.weight_shape", "weight_shape is not the student's bytes"),
        ("gate_proj.weight_packed", "codes are not the integer codes of the latents"),
        ("layers.0.input_layernorm.weight", "input_layernorm.weight is not the student's"),
    ],
)
def test_the_proof_finds_one_changed_value(target: tuple[Path, Latents], suffix: str, message: str):
    folder, latents = target
    prove_tensors(Tensors(folder), latents, Log("pack"))
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith(suffix))
    tensors[name].view(-1)[-1] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=message):
        prove_tensors(Tensors(folder), latents, Log("pack"))


@pytest.mark.parametrize("model", ["qwen3_5_multimodal"], indirect=True)
def test_the_proof_finds_codes_that_their_own_weights_do_not_have(latents: Path, student: Path, model: Path, tmp_path):
    other = shutil.copytree(student, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors[f"{MTP}.weight_scale"][5, 0] = 3e38  # twice that overflows
    save_file(tensors, other / "model.safetensors")
    trained = write_target(other, latents, model, tmp_path / "target", Log("pack"))
    with pytest.raises(UserError, match=f"{MTP}: the student's own weights do not have the student's own codes"):
        prove_tensors(Tensors(tmp_path / "target"), trained, Log("pack"))


def test_the_proof_finds_a_module_that_is_not_quantised(target: tuple[Path, Latents]):
    folder, latents = target
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("o_proj.weight_packed")).rpartition(".")[0]
    for kind in ("packed", "scale", "shape"):
        del tensors[f"{name}.weight_{kind}"]
    save_file(tensors | {f"{name}.weight": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(UserError, match=f"missing {name}; unexpected none"):
        prove_tensors(Tensors(folder), latents, Log("pack"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_part_when_the_target_is_another_model(
    target: tuple[Path, Latents], student: Path, tmp_path: Path, dtype: torch.dtype
):
    folder, latents = target
    pieces = held_out_pieces(random_sequences(tmp_path, 320), 1000, 0)
    same = logit_difference(folder, latents, pieces, dtype)
    assert same["proof_tokens"] == sum(piece.numel() for piece in pieces) > 200
    assert (same["kl"], same["max_logit_difference"]) == (0, 0)
    other = logit_difference(student, latents, pieces, dtype)
    assert other["kl"] > Config().max_kl
    models = (load_model(one, dtype) for one in (folder, student))
    with torch.inference_mode():
        p, q = (torch.cat([model(piece).logits[0].double() for piece in pieces]).log_softmax(-1) for model in models)
    assert other["kl"] == pytest.approx(float((p.exp() * (p - q)).sum() / len(p)), rel=1e-3)


def test_logits_are_compared_on_held_out_tokens_drawn_by_the_seed(tmp_path: Path):
    sequences = random_sequences(tmp_path, 320)
    size, val = read_index(sequences)["splits"]["val"]["tokens"], np.fromfile(sequences / "val.bin", "<i4")
    assert 256 < size < len(val)
    pieces = held_out_pieces(sequences, 10**6, 0)
    assert [piece.shape for piece in pieces] == [(1, min(128, size - start)) for start in range(0, size, 128)]
    assert np.array_equal(torch.cat(pieces, 1)[0], val[:size])
    assert len(held_out_pieces(sequences, 129, 0)) == 2
    drawn = [held_out_pieces(sequences, 1, seed)[0] for seed in range(20)]
    assert all(any(torch.equal(one, piece) for piece in pieces) for one in drawn)
    assert len({tuple(one[0].tolist()) for one in drawn}) > 1
    assert all(torch.equal(one, held_out_pieces(sequences, 1, seed)[0]) for seed, one in enumerate(drawn))


def test_sequences_of_another_vocabulary_are_refused(latents: Path, student: Path, model: Path, tmp_path: Path):
    with pytest.raises(UserError, match="sequences of a vocabulary of 321, models of 320"):
        pack(latents, student, model, tmp_path, vocabulary=321)


def test_a_target_whose_answers_would_not_end_is_refused(latents: Path, student: Path, model: Path, tmp_path: Path):
    other = shutil.copytree(model, tmp_path / "other")
    (other / "generation_config.json").write_text('{"eos_token_id": 0}')
    with pytest.raises(UserError, match=r"generation_config.json: eos_token_id is 0, the tokenizer's is 2"):
        pack(latents, student, other, tmp_path)


def test_a_target_without_finite_logits_is_refused(latents: Path, student: Path, model: Path, tmp_path: Path):
    other = shutil.copytree(student, tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    next(tensor for name, tensor in tensors.items() if name.endswith("input_layernorm.weight"))[3] = float("nan")
    save_file(tensors, other / "model.safetensors")
    with pytest.raises(UserError, match="differs from the fake-quantised student by nan nats"):
        pack(latents, other, model, tmp_path)


def test_transformers_reads_the_text_model_alone_as_we_do(target: tuple[Path, Latents]):
    folder, _ = target
    theirs, report = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    tokens = torch.arange(7, 47)[None]
    with torch.inference_mode():
        assert torch.equal(theirs(tokens).logits, load_model(folder)(tokens).logits)


def test_packed_modules_stream_in_the_students_order(target: tuple[Path, Latents], student: Path):
    _, latents = target
    assert [name for name, _ in latents.packed(Log("pack"))] == [name for name, _ in iterate_grid(Tensors(student))]
