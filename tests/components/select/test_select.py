import json

import pytest
import torch
from safetensors.torch import load_file

from components.checkpoint.load import load_model
from components.contract.context import Input, Inputs, Output
from components.contract.log import Log
from components.qad.stage import Config as QadConfig
from components.qad.train import train
from components.select import stage
from components.sequences.reader import read_split
from components.store.artifact import commit
from components.store.backend import Store
from components.store.work import Work
from tests.components.qad.conftest import quantize_folder, random_sequences


def output_in(folder, name):
    (folder / name / "out").mkdir(parents=True)
    work = Work(Store(str(folder / "store")), f"_work/{name}/x")
    return Output(folder / name / "out", folder / name, work, Log(name))


@pytest.fixture
def inputs(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setenv("QDFLASH_HOME", str(tmp_path / "home"))
    student = quantize_folder(tiny_model, tmp_path / "student")
    (tmp_path / "sequences").mkdir()
    sequences = random_sequences(tmp_path / "sequences", 320)
    trained = output_in(tmp_path, "qad")
    config = QadConfig(steps=4, batch=4, learning_rate=3e-2, optimizer="adamw", dtype="float32", checkpoint_every=2)
    train(config, tiny_model, student, sequences, trained.scratch, trained)
    folders = {"qad": trained.path, "student": student, "teacher": tiny_model, "sequences": sequences}
    store, bound = Store(str(tmp_path / "store")), {}
    for port, folder in folders.items():
        artifact, _ = commit(store, "model", port.encode().hex().ljust(64, "0"), folder, {"metrics": {}})
        bound[port] = [Input(artifact.uri)]
    return Inputs(bound)


def test_chooses_the_lowest_kl_on_all_val_sequences(inputs, tmp_path):
    output = output_in(tmp_path, "select")
    metrics = stage.run(stage.Config(dtype="float32"), inputs, output)
    assert [path.name for path in output.path.iterdir()] == ["scores.json"]
    document = json.loads((output.path / "scores.json").read_text())
    scores = {one["step"]: one for one in document["scores"]}
    assert list(scores) == [0, 2, 4]
    best = min((2, 4), key=lambda step: scores[step]["kl"])
    assert (metrics["step"], metrics["kl"], metrics["kl_start"]) == (best, scores[best]["kl"], scores[0]["kl"])
    chosen = inputs["qad"].path / f"checkpoints/step-{best}/latents.safetensors"
    assert (document["chosen"], document["qad"]) == (best, inputs["qad"].digest)
    assert scores[0]["codes_changed"] == 0
    assert all(f"{name}_scale" in load_file(chosen) for name in load_file(chosen) if name.endswith(".weight"))

    split = read_split(inputs["sequences"].path, "val")
    ids, mask = torch.from_numpy(split.ids.astype("int64")), torch.from_numpy(split.mask[:, 1:].astype(bool))
    with torch.no_grad():
        p, q = (
            load_model(inputs[port].path, torch.float64)(input_ids=ids).logits[:, :-1].log_softmax(-1)[mask]
            for port in ("teacher", "student")
        )
    assert metrics["kl_start"] == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-4)
    assert metrics["top1_start"] == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert scores[0]["tokens"] == int(mask.sum())


@pytest.mark.parametrize("damaged", [b'{"step": 4, "kl"', b'{"step": 4}', b"[]"])
def test_kept_scores_are_not_computed_again_but_damaged_ones_are(inputs, tmp_path, damaged):
    output = output_in(tmp_path, "select")
    kept = {"step": 2, "kl": -1.0, "top1_agreement": 1.0, "tokens": 1, "codes_changed": 0.5}
    output.work.put("scores/step-00000002.json", json.dumps(kept).encode())
    output.work.put("scores/step-00000004.json", damaged)
    assert stage.run(stage.Config(dtype="float32"), inputs, output)["kl"] == -1.0
    found = json.loads((output.path / "scores.json").read_text())["scores"]
    assert [one["step"] for one in found] == [0, 2, 4]
    assert found[2]["kl"] > 0


def test_accuracy_decides_where_there_are_tasks_and_kl_among_equals(inputs, tmp_path):
    tasks = tmp_path / "piqa.jsonl"
    rows = [{"goal": f"item {n}", "sol1": f"take {n}", "sol2": "leave it", "label": n % 2} for n in range(6)]
    tasks.write_text("".join(json.dumps(one) + "\n" for one in rows))
    bound = Inputs(inputs.bound | {"tasks": [Input(str(tasks))]})
    common = {"top1_agreement": 1.0, "tokens": 1, "codes_changed": 0.5}
    for number, (accuracies, chosen) in enumerate((((0.4, 0.6), 4), ((0.6, 0.4), 2), ((0.5, 0.5), 2))):
        output = output_in(tmp_path, f"select-{number}")
        for step, kl, accuracy in zip((2, 4), (0.1, 0.2), accuracies, strict=True):
            kept = {"step": step, "kl": kl, "accuracy": {"piqa": accuracy}, "mean_accuracy": accuracy, **common}
            output.work.put(f"scores/step-{step:08d}.json", json.dumps(kept).encode())
        metrics = stage.run(stage.Config(dtype="float32"), bound, output)
        document = json.loads((output.path / "scores.json").read_text())
        assert (document["rule"], document["chosen"], metrics["step"]) == ("highest mean accuracy", chosen, chosen)
        assert metrics["mean_accuracy"] == max(accuracies)
        start = document["scores"][0]
        assert start["step"] == 0
        assert start["mean_accuracy"] == start["accuracy"]["piqa"] in [n / 6 for n in range(7)]
