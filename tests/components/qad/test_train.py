import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from components.checkpoint.load import load_model
from components.checkpoint.quantize import fake_quantize
from components.contract.context import Output
from components.contract.errors import StageError, UserError
from components.contract.log import Log
from components.qad.checkpoints import restore_checkpoints, save_checkpoint
from components.qad.hidden import TeacherStates, head
from components.qad.loss import forward_kl
from components.qad.optimizer import batch_indices, learning_rate
from components.qad.stage import Config
from components.qad.student import Student, check_pair
from components.qad.train import Run, train
from components.sequences.reader import read_split
from components.store.backend import Store
from components.store.work import Work
from tests.components.checkpoint.conftest import compress
from tests.components.conftest import SHAPE
from tests.components.tiny_models import KINDS, build

SETTINGS = {
    "steps": 6,
    "batch": 4,
    "learning_rate": 4.5e-3,
    "optimizer": "adamw",
    "dtype": "float32",
    "evaluate_every": 3,
    "checkpoint_every": 3,
    "max_grad_norm": 1.0,
}


def output_in(folder):
    (folder / "out").mkdir(parents=True)
    return Output(folder / "out", folder, Work(Store(str(folder / "store")), "_work/qad/x"), Log("qad"))


@pytest.fixture
def folders(tiny_model, tiny_student, tiny_sequences):
    return tiny_model, tiny_student, tiny_sequences


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_brings_the_student_closer_and_stores_what_it_quantised(folders, tmp_path, dtype):
    """On the rows it trains on: what random weights say of one row teaches nothing about another."""
    output = output_in(tmp_path)
    teacher, student, sequences = folders
    seen = tmp_path / "seen"
    shutil.copytree(sequences, seen)
    for part in seen.glob("train.*"):
        shutil.copyfile(part, seen / part.name.replace("train.", "val."))
    index = json.loads((seen / "index.json").read_text())
    index["splits"]["val"] = index["splits"]["train"]
    (seen / "index.json").write_text(json.dumps(index))
    metrics = train(Config(**SETTINGS | {"dtype": dtype}), teacher, student, seen, output.scratch, output)
    assert metrics["kl_after"] < metrics["kl_before"]
    assert 0 < metrics["codes_changed"] < 1
    curve = [json.loads(line) for line in (output.path / "curve.jsonl").read_text().splitlines()]
    assert [line["step"] for line in curve] == list(range(7))
    assert [line["step"] for line in curve if "kl" in line] == [0, 3, 6]
    stored = load_file(output.path / "checkpoints/step-6/latents.safetensors")
    student = Student.open(folders[1], getattr(torch, dtype))
    student.load(output.path / "checkpoints/step-6")
    for name, layer in student.layers.items():
        latents, scales = stored[f"{name}.weight"], stored[f"{name}.weight_scale"]
        assert latents.dtype == layer.dtype
        identity = torch.eye(latents.shape[1], dtype=layer.dtype)
        assert torch.equal(layer(identity).T, fake_quantize(latents, scales))


def test_the_start_is_the_checkpoint_itself(folders):
    ids = torch.arange(12).unsqueeze(0)
    student = Student.open(folders[1], torch.float32)
    with torch.no_grad():
        served = load_model(folders[1], torch.float32)(input_ids=ids).logits
        assert torch.equal(student.model(input_ids=ids).logits, served)
    assert student.codes_changed() == 0
    assert len(student.layers) == 28


@pytest.mark.parametrize("group", [32, 64, 128])
def test_a_grid_of_any_group_starts_as_the_library_reads_it(tmp_path, group):
    sizes = {"hidden_size": 128, "head_dim": 64, "num_hidden_layers": 2}
    dense = AutoModelForCausalLM.from_config(AutoConfig.for_model(**SHAPE | sizes), dtype=torch.bfloat16)
    dense.save_pretrained(tmp_path / "dense")
    compress(tmp_path / "dense", tmp_path / "packed", group)
    check_pair(tmp_path / "dense", tmp_path / "packed", 320)
    student = Student.open(tmp_path / "packed", torch.bfloat16)
    assert {layer.latents.shape[1] // layer.weight_scale.shape[1] for layer in student.layers.values()} == {group}
    assert len(student.layers) == 14
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "packed", dtype=torch.bfloat16)
    ids = torch.arange(12).unsqueeze(0)
    with torch.no_grad():
        assert torch.equal(student.model(input_ids=ids).logits, theirs(input_ids=ids).logits)


def test_only_the_latents_train(folders, tmp_path):
    distillation = Run(Config(**SETTINGS), *folders, tmp_path)
    tensors = lambda: {k: v.clone() for k, v in distillation.student.model.state_dict().items()}  # noqa: E731
    before = tensors()
    for step in range(3):
        distillation.step(step)
    latents = {f"{name}.weight" for name in distillation.student.layers}
    changed = {name for name, value in tensors().items() if not torch.equal(value, before[name])}
    assert changed == latents


def test_a_frozen_tensor_that_changes_is_an_error(folders, tmp_path, monkeypatch):
    def careless(self, step):
        self.student.model.get_input_embeddings().weight.data[0, 0] += 1e-3
        return step_of(self, step)

    step_of = Run.step
    metrics = train(Config(**SETTINGS), *folders, tmp_path, output_in(tmp_path))
    assert metrics["frozen_sha256"] == Student.open(folders[1], torch.float32).frozen_digest()
    monkeypatch.setattr(Run, "step", careless)
    (tmp_path / "careless").mkdir()
    with pytest.raises(StageError, match="must not train"):
        train(Config(**SETTINGS), *folders, tmp_path / "careless")


def test_recomputed_activations_give_the_same_gradient(folders, tmp_path):
    found = []
    for recompute in (False, True):
        run, passes = Run(Config(**SETTINGS | {"recompute_activations": recompute}), *folders, tmp_path), []
        run.student.layers["model.layers.0.mlp.up_proj"].register_forward_hook(lambda *_: passes.append(1))  # noqa: B023
        found.append((run.backward([0, 5]), [master.grad for master in run.student.masters()]))
        assert len(passes) == (4 if recompute else 2)
    assert found[0][0] == found[1][0]
    for one, other in zip(found[0][1], found[1][1], strict=True):
        torch.testing.assert_close(one, other)


def test_moments_of_8_bits_without_a_gpu_are_refused(folders, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match="adamw8bit needs a GPU"):
        train(Config(**SETTINGS | {"optimizer": "adamw8bit"}), *folders, tmp_path)


def test_how_a_batch_is_split_does_not_change_its_gradient(folders, tmp_path):
    found = {}
    for size in (1, 2, 4):
        distillation = Run(Config(**SETTINGS | {"micro_batch": size}), *folders, tmp_path)
        loss = distillation.backward([0, 5, 2, len(distillation.split) - 1])
        found[size] = loss, torch.cat([master.grad.flatten() for master in distillation.student.masters()])
    for size in (1, 2):
        assert found[size][0] == pytest.approx(found[4][0], rel=1e-6)
        assert (found[size][1] - found[4][1]).norm() / found[4][1].norm() < 1e-5


def test_loss_is_the_mean_over_the_batch_of_the_dense_divergence(folders, tmp_path):
    distillation = Run(Config(**SETTINGS), *folders, tmp_path)
    indices = [1, 3, 4, 0]
    ids = torch.from_numpy(distillation.split.ids[indices].astype("int64"))
    mask = torch.from_numpy(distillation.split.mask[indices, 1:].astype(bool))
    with torch.no_grad():
        p, q = (
            load_model(folder, torch.float64)(input_ids=ids).logits[:, :-1].log_softmax(-1) for folder in folders[:2]
        )
    expected = (p.exp() * (p - q)).sum(-1)[mask].mean()
    assert distillation.backward(indices) == pytest.approx(float(expected), rel=1e-4)


def test_cached_teacher_states_are_the_computed_ones(folders, tmp_path):
    teacher, split = load_model(folders[0], torch.bfloat16), read_split(folders[2], "train")
    plain, cached = TeacherStates(teacher, split), TeacherStates(teacher, split, tmp_path / "cache.bin")
    for index in (3, 0, 3):
        assert torch.equal(plain(index), cached(index))
    assert cached(3).shape[0] == int(split.mask[3, 1:].sum())


def test_nan_names_step_and_batch_and_keeps_what_was_good(folders, tmp_path, monkeypatch):
    finite, calls, output = forward_kl, [], output_in(tmp_path / "diverging")
    config = Config(**SETTINGS | {"checkpoint_every": 2, "state_every": 2})

    def diverging(*arguments):
        calls.append(1)
        return finite(*arguments) * (float("nan") if len(calls) > 2 * SETTINGS["batch"] else 1.0)

    whole = output_in(tmp_path / "whole")
    train(config, *folders, whole.scratch, whole)
    monkeypatch.setattr("components.qad.train.forward_kl", diverging)
    with pytest.raises(UserError, match=r"step 3: loss nan") as caught:
        train(config, *folders, output.scratch, output)
    monkeypatch.undo()
    indices = batch_indices(2, config.batch, len(read_split(folders[2], "train")), config.seed)
    assert f"on sequences {indices}" in str(caught.value)
    assert output.work.folders() == ["checkpoints/step-2", "state"]
    again = output_in(tmp_path / "again")
    train(config, *folders, again.scratch, replace(again, work=output.work))
    for step in (2, 4, 6):
        name = f"checkpoints/step-{step}/latents.safetensors"
        assert (again.path / name).read_bytes() == (whole.path / name).read_bytes()


def test_a_last_step_that_diverges_publishes_nothing(folders, tmp_path):
    """Its loss, which is of before the step, is finite."""
    output = output_in(tmp_path)
    config = Config(**SETTINGS | {"steps": 1, "learning_rate": 1e39, "dtype": "bfloat16"})
    with pytest.raises(UserError, match=r"KL on val sequence 0 is nan: .*lower qad\.learning_rate"):
        train(config, *folders, output.scratch, output)
    assert not list(output.path.iterdir())


@pytest.mark.parametrize("damage", ["torn", "gone", "index"])
def test_a_damaged_checkpoint_of_an_earlier_run_is_not_published(folders, tmp_path, damage):
    output, store = output_in(tmp_path), Store(str(tmp_path / "store"))
    student = Student.open(folders[1], torch.float32)
    for step in (2, 4):
        save_checkpoint(output.work, output.path, step, student)
    shutil.rmtree(output.path / "checkpoints")
    restore_checkpoints(output.work, output.path, 3, 2)
    assert [path.name for path in (output.path / "checkpoints").iterdir()] == ["step-2"]
    kind = "index" if damage == "index" else "folders"
    (key,) = (key for key in store.keys(f"_work/qad/x/{kind}") if "step-2" in key)
    if damage == "torn":
        store.write(key, (store.read(key) or b"")[:-1])
    else:
        store.delete(key)
    with pytest.raises(UserError, match="_work/qad/x: its checkpoints/step-2 is missing or damaged"):
        restore_checkpoints(output.work, output.path, 3, 2)


def test_a_damaged_state_is_not_quietly_begun_anew(folders, tmp_path):
    config, output, store = (
        Config(**SETTINGS | {"state_every": 4}),
        output_in(tmp_path),
        Store(str(tmp_path / "store")),
    )
    train(config, *folders, output.scratch, output)
    key = next(key for key in store.keys("_work/qad/x/folders") if key.endswith("rank-0.pt"))
    store.write(key, (store.read(key) or b"")[:-1] + b"!")
    again = output_in(tmp_path / "again")
    with pytest.raises(UserError, match="_work/qad/x: its training state is damaged; remove"):
        train(config, *folders, again.scratch, replace(again, work=output.work))


def test_a_held_out_subset_without_a_counted_token_is_refused(folders, tmp_path):
    shutil.copytree(folders[2], quiet := tmp_path / "quiet")
    mask = bytearray((quiet / "val.mask.bin").read_bytes())
    mask[: 2 * 32] = bytes(2 * 32)
    (quiet / "val.mask.bin").write_bytes(mask)
    with pytest.raises(UserError, match=r"evaluation_sequences: none of the first 2 val sequences"):
        train(Config(**SETTINGS | {"evaluation_sequences": 2}), *folders[:2], quiet, tmp_path)


@pytest.mark.parametrize("broken", [0, 1], ids=["teacher", "student"])
def test_a_model_that_holds_nan_is_named_before_it_trains(folders, tmp_path, broken):
    shutil.copytree(folders[broken], bad := tmp_path / "bad")
    stored = load_file(bad / "model.safetensors")
    stored["model.norm.weight"][3] = float("nan")
    save_file(stored, bad / "model.safetensors")
    pair = [bad if place == broken else folder for place, folder in enumerate(folders[:2])]
    with pytest.raises(UserError, match="bad: predicts NaN"):
        train(Config(**SETTINGS), *pair, folders[2], tmp_path, output_in(tmp_path))


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_and_what_was_quantised_of_it_are_a_pair(kind, tmp_path):
    model = build(kind, tmp_path / "dense")
    compress(model, tmp_path / "packed")
    check_pair(model, tmp_path / "packed", 320)
    with pytest.raises(UserError, match="packed: the teacher is quantised"):
        check_pair(tmp_path / "packed", tmp_path / "packed", 320)


@pytest.mark.parametrize(
    ("field", "value"), [("vocab_size", 321), ("hidden_size", 96), ("tie_word_embeddings", False)]
)
def test_another_model_is_refused(folders, tmp_path, field, value):
    teacher = tmp_path / "teacher"
    teacher.mkdir()
    config = json.loads((folders[0] / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(UserError, match=field):
        check_pair(teacher, folders[1], 320)
    with pytest.raises(UserError, match="999"):
        check_pair(folders[0], folders[1], 999)


def test_what_a_config_leaves_out_is_its_default(folders, tmp_path):
    """Older libraries leave out what is the default: Qwen3's head is not tied."""
    teacher, student = tmp_path / "teacher", tmp_path / "student"
    for source, place, change in ((folders[0], teacher, {}), (folders[1], student, {"tie_word_embeddings": False})):
        shutil.copytree(source, place)
        config = json.loads((place / "config.json").read_text())
        del config["tie_word_embeddings"]
        (place / "config.json").write_text(json.dumps(config | change))
    check_pair(teacher, student, 320)
    with pytest.raises(UserError, match="tie_word_embeddings is True, the teacher's is False"):
        check_pair(teacher, folders[1], 320)


@pytest.mark.parametrize("part", ["weight_packed", "weight_scale", "config.json"])
def test_a_grid_of_another_shape_is_refused_from_the_headers(folders, tmp_path, part):
    """A module of half the rows, or scales that are declared to be of larger groups."""
    shutil.copytree(folders[1], other := tmp_path / "other")
    if part == "config.json":
        config = json.loads((other / part).read_text())
        config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 64
        (other / part).write_text(json.dumps(config))
    else:
        stored, name = load_file(other / "model.safetensors"), f"model.layers.2.mlp.up_proj.{part}"
        save_file(stored | {name: stored[name][:64].clone()}, other / "model.safetensors")
    with pytest.raises(UserError, match=r"mlp\.\w+ has codes .* no grid of the teacher's \[\d+, \d+\]"):
        check_pair(folders[0], other, 320)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_scales_that_engines_would_round_are_refused(tmp_path, dtype):
    """vLLM holds a weight_scale in the model's own dtype, here bfloat16, whatever the file has."""
    model, packed = build("qwen3_5_multimodal", tmp_path / "dense"), tmp_path / "packed"
    compress(model, packed)
    check_pair(model, packed, 320)
    stored, name = load_file(packed / "model.safetensors"), "model.language_model.layers.1.mlp.up_proj.weight_scale"
    save_file(stored | {name: stored[name].to(dtype)}, packed / "model.safetensors")
    with pytest.raises(UserError, match=r"mlp.up_proj.weight_scale is float\d\d, which engines round to .* bfloat16"):
        check_pair(model, packed, 320)


def test_a_student_that_could_not_be_packed_is_refused_before_it_trains(folders, tmp_path):
    """Engines fuse up_proj with gate_proj."""
    shutil.copytree(folders[1], partly := tmp_path / "partly")
    name, stored = "model.layers.2.mlp.up_proj", load_file(partly / "model.safetensors")
    kept = {key: value for key, value in stored.items() if not key.startswith(f"{name}.")}
    dense = load_file(folders[0] / "model.safetensors")[f"{name}.weight"]
    save_file(kept | {f"{name}.weight": dense}, partly / "model.safetensors")
    with pytest.raises(UserError, match=r"layers\.2\.mlp\.gate_proj is quantised but .*up_proj not"):
        check_pair(folders[0], partly, 320)


def test_a_checkpoint_of_another_grid_is_refused(folders, tmp_path):
    student = Student.open(folders[1], torch.float32)
    next(iter(student.layers.values())).weight_scale[0, 0] *= 2
    student.save(tmp_path)
    with pytest.raises(UserError, match="another grid"):
        Student.open(folders[1], torch.float32).load(tmp_path)


@pytest.mark.parametrize(
    ("damage", "says"), [("gone", "missing"), ("torn", "no safetensors file"), ("nan", "holds NaN or infinity")]
)
def test_a_damaged_checkpoint_is_named(folders, tmp_path, damage, says):
    student = Student.open(folders[1], torch.float32)
    name, layer = next(iter(student.layers.items()))
    if damage == "nan":
        layer.weight.data[0, 0] = float("nan")
    student.save(tmp_path)
    file = tmp_path / "latents.safetensors"
    if damage == "torn":
        file.write_bytes(file.read_bytes()[:1000])
    elif damage == "gone":
        file.unlink()
    with pytest.raises(UserError, match=rf"latents\.safetensors: .*{says}") as caught:
        Student.open(folders[1], torch.float32).load(tmp_path)
    assert (name in str(caught.value)) == (damage == "nan")


def test_a_capped_head_is_refused(folders):
    model = load_model(folders[0], torch.float32)
    model.register_forward_hook(lambda _m, _i, out: setattr(out, "logits", out.logits.tanh()) or out)
    with pytest.raises(UserError, match="unsupported"):
        head(model)


def test_every_sequence_is_seen_once_an_epoch():
    seen = [index for step in range(6) for index in batch_indices(step, 5, 15, seed=3)]
    assert sorted(seen[:15]) == sorted(seen[15:]) == list(range(15))
    assert seen[:15] != seen[15:]


def test_learning_rate_rises_then_falls_to_zero():
    rates = [learning_rate(step, 100, 1.0, 0.1) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[55] == pytest.approx(0.5)
    assert rates[-1] < 1e-3
    assert learning_rate(0, 1, 1.0, 0.0) == 1.0


def test_shards_of_a_wrong_size_are_refused(folders, tmp_path):
    shutil.copytree(folders[2], tmp_path / "sequences")
    (tmp_path / "sequences/train.mask.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"train\.mask\.bin"):
        read_split(tmp_path / "sequences", "train")
