"""A quantised output head: made by ptq, distilled with the rest, packed."""

import json

import pytest
import torch
from safetensors.torch import load_file

from components.checkpoint.load import load_model
from components.checkpoint.quantize import fake_quantize, integer_codes
from components.contract.context import Input, Inputs, Output
from components.contract.errors import UserError
from components.contract.log import Log
from components.pack import stage as pack
from components.ptq import stage as ptq
from components.qad.stage import Config
from components.qad.student import Student, check_pair
from components.qad.train import Run, train
from components.store.artifact import commit
from components.store.backend import Store
from components.store.work import Work

SETTINGS = {
    "steps": 4,
    "batch": 4,
    "learning_rate": 3e-2,
    "optimizer": "adamw",
    "dtype": "float32",
    "checkpoint_every": 4,
}


class Place:
    def __init__(self, folder):
        self.folder, self.store = folder, Store(str(folder / "store"))

    def output(self, name):
        (self.folder / name / "out").mkdir(parents=True)
        return Output(self.folder / name / "out", self.folder / name, Work(self.store, f"_work/{name}/x"), Log(name))

    def bind(self, **folders):
        bound = {}
        for port, folder in folders.items():
            artifact, _ = commit(self.store, "model", port.encode().hex().ljust(64, "0"), folder, {"metrics": {}})
            bound[port] = [Input(artifact.uri)]
        return Inputs(bound)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv("QDFLASH_HOME", str(tmp_path / "home"))
    return Place(tmp_path)


@pytest.fixture(params=[4, 8])
def bits(request):
    return request.param


@pytest.fixture
def start(place, tiny_model, bits):
    """The INT4 checkpoint whose head is quantised too."""
    output = place.output("ptq")
    ptq.run(ptq.Config(head={"bits": bits}), place.bind(model=tiny_model), output)
    return output.path


def test_rounding_unties_the_head_and_keeps_the_embedding(start, tiny_model, bits):
    config = json.loads((start / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    groups = config["quantization_config"]["config_groups"]
    widths = {group["targets"][0]: group["weights"]["num_bits"] for group in groups.values()}
    assert widths == {"Linear": 4, "re:.*lm_head": bits}
    dense, rounded = load_model(tiny_model, torch.float32), load_model(start, torch.float32)
    embedding = dense.get_input_embeddings().weight
    assert torch.equal(rounded.get_input_embeddings().weight, embedding)
    stored = load_file(start / "model.safetensors")
    scales = stored["lm_head.weight_scale"].double().repeat_interleave(32, 1)
    low, high = {4: (-8, 7), 8: (-128, 127)}[bits]
    nearest = torch.clamp(torch.round(embedding.bfloat16().double() / scales), low, high) * scales  # ptq reads BF16
    torch.testing.assert_close(rounded.lm_head.weight.double(), nearest, rtol=1e-6, atol=0)


def test_the_head_trains_by_the_dense_gradient(start, tiny_model, tiny_sequences, tmp_path):
    run = Run(Config(**SETTINGS), tiny_model, start, tiny_sequences, tmp_path)
    indices = [1, 4]
    run.backward(indices)
    ids = torch.from_numpy(run.split.ids[indices].astype("int64"))
    mask = torch.from_numpy(run.split.mask[indices, 1:].astype(bool))
    teacher, student = load_model(tiny_model, torch.float64), load_model(start, torch.float64)
    with torch.no_grad():
        p = teacher(input_ids=ids).logits[:, :-1].log_softmax(-1)[mask]
    q = student(input_ids=ids).logits[:, :-1].log_softmax(-1)[mask]
    (p.exp() * (p - q)).sum(-1).mean().backward()
    found, expected = run.student.layers["lm_head"].weight.grad.double(), student.lm_head.weight.grad
    assert (found - expected).norm() / expected.norm() < 1e-4


def test_the_trained_head_is_what_the_packed_target_has(place, start, tiny_model, tiny_sequences, bits):
    output = place.output("qad")
    train(Config(**SETTINGS), tiny_model, start, tiny_sequences, output.scratch, output)
    latents = load_file(output.path / "checkpoints/step-4/latents.safetensors")
    weight, scales = latents["lm_head.weight"], latents["lm_head.weight_scale"]
    before = Student.open(start, torch.float32)
    assert (integer_codes(weight, scales, bits) != before.start["lm_head"]).any()
    packed = place.output("pack")
    bound = place.bind(qad=output.path, student=start, model=tiny_model, sequences=tiny_sequences)
    choice = place.output("select").path
    (choice / "scores.json").write_text(json.dumps({"chosen": 4, "qad": bound["qad"].digest}))
    metrics = pack.run(pack.Config(), Inputs(bound.bound | place.bind(selected=choice).bound), packed)
    assert metrics["quantized"] == 29
    model = load_model(packed.path, torch.float32)
    assert torch.equal(model.lm_head.weight, fake_quantize(weight, scales, bits))
    groups = json.loads((packed.path / "config.json").read_text())["quantization_config"]["config_groups"]
    assert len(groups) == 2


def test_another_tying_is_refused_unless_the_head_is_quantised(start, tiny_model, tiny_student, tmp_path):
    check_pair(tiny_model, start, 320)
    other = tmp_path / "untied"
    other.mkdir()
    config = json.loads((tiny_model / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    with pytest.raises(UserError, match="tie_word_embeddings"):
        check_pair(other, tiny_student, 320)
