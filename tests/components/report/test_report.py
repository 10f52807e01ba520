"""The page of a made-up run: what must be on it is read back from the HTML."""

import html.parser
import json

import pytest

from components.contract.context import Input
from components.gate.rules import lookup
from components.report.collect import collect
from components.report.page import notes, render
from components.report.table import comparison, headline
from components.store import Store, commit

CI = {"low": 1.2, "high": 1.6, "n": 24}


def put(store, tmp_path, stage, number, metrics, config=None, inputs=None, **files):
    folder = tmp_path / f"{stage}-{number}"
    folder.mkdir()
    for name, lines in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "done").write_text("x")
    manifest = {"config": config or {}, "inputs": inputs or {}, "metrics": metrics, "seconds": 1.5}
    made = {"versions": {"python": "3.11"}, "started": 86400.0 * int(number, 16)}
    artifact, _ = commit(store, stage, number * 64, folder, {**manifest, **made})
    return Input(artifact.uri)


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    monkeypatch.setenv("QDFLASH_HOME", str(tmp_path / "home"))
    store = Store(str(tmp_path / "store"))
    machine = {"device": "cpu", "cores": 2}
    latency = {"short": {"median_ms": 100.0, "low": 90.0, "high": 110.0, "n": 5}}
    sample = {"id": "p1", "prompt": "Say <b>hi</b> & go", "text": "hi"}
    model = put(store, tmp_path, "model", "1", {}, config={"source": {"kind": "wheel"}})
    inputs = {
        "teacher": model,
        "qad": put(
            store,
            tmp_path,
            "qad",
            "2",
            {"kl_before": 0.5, "kl_after": 0.25, "codes_changed": 0.01},
            inputs={"teacher": [model.uri], "tasks": [f"s3://b/_files/{'a' * 64}/mmlu_pro_validation.jsonl"]},
            curve=[{"step": 0, "kl": 0.5, "loss": 0.6}, {"step": 5, "kl": 0.25, "loss": 0.3}],
        ),
        "pack": put(store, tmp_path, "pack", "0", {"kl": 2.5e-6, "max_logit_difference": 0.125, "proof_tokens": 512}),
        "drafter_1": put(
            store,
            tmp_path,
            "drafter",
            "6",
            {"accept_length": {"bigram": {"value": 1.3, "low": 1.2, "high": 1.4}}, "per_position": [0.4, 0.2]},
            curve=[{"step": 0, "accept_length": {"value": 1.0}}, {"step": 1, "loss": 3.0}],
        ),
        "gptq": put(
            store, tmp_path, "gptq", "7", {"accept_length": {"after": {"value": 1.25, "low": 1.2, "high": 1.3}}}
        ),
        "measure_baseline": put(
            store, tmp_path, "measure", "3", {"latency": latency, "machine": machine}, samples=[sample]
        ),
        "measure_pair": put(
            store,
            tmp_path,
            "measure",
            "4",
            {
                "latency": latency,
                "machine": machine,
                "parity": {"compared": 8, "equal": 7, "ties": 1, "broken": 0},
                "sampled": {"passed": True, "tests": {"temperature 1": {"p": 0.4567, "passed": True}}},
                "acceptance_length": {"value": 1.4, **CI, "per_position": [0.3, 0.1]},
                "quality": {"ifeval": {"score": 0.5, **CI, "power": False}},
            },
            samples=[sample],
        ),
        "gate": put(
            store,
            tmp_path,
            "gate",
            "5",
            {
                "passed": False,
                "failed": ["acceptance"],
                "rules": [
                    {"name": "acceptance", "metric": "m", "value": 1 / 81, "demand": "above 2", "status": "fail"}
                ],
            },
        ),
    }
    return collect(inputs)


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.ids, self.targets, self.sources, self.svgs = set(), [], [], 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.svgs += tag == "svg"
        if "id" in attributes:
            self.ids.add(attributes["id"])
        if tag == "a":
            self.targets.append(attributes["href"])
        if tag in ("script", "link", "img", "iframe"):
            self.sources.append(tag)


def test_the_page_carries_every_figure_and_needs_nothing_else(tasks):
    text, sections = render("a run", tasks, 6)
    page = Page(text)
    assert page.sources == []
    assert "http://" not in text.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    )
    assert {target.removeprefix("#") for target in page.targets} <= page.ids
    assert page.svgs == 7
    assert {"verdict", "comparison", "notes", "figures", "training", "samples", "lineage"} == set(sections)
    for figure in (
        "1.4 [1.2, 1.6], n = 24",
        "0.5 → 0.25",
        "2.5e-06 on 512 held-out tokens; largest difference of a logit 0.125",
        "7 of 8 equal",
        "100 [90, 110], n = 5",
        "(no power)",
        "1.3 [1.2, 1.4]",
        "1.25 [1.2, 1.3]",
        "<td>0.15 [-0.05616, 0.3562]</td>",  # 0.15 − √(0.2² + 0.05²) and + √(0.2² + 0.05²)
        "drafter_1, held-out",
        "<td>0.01235</td>",
        f'teacher <a href="#{"1" * 64}">teacher</a>',
        "<code>mmlu_pro_validation.jsonl</code>",
        "<dt><b>acceptance length</b></dt>",
        "<td>holds: temperature 1: p = 0.4567</td>",
        "Run of 1970-01-08 00:00 UTC",
    ):
        assert figure in text
    assert "Gate not met: acceptance" in text


def test_text_from_the_model_is_escaped(tasks):
    text, _ = render("a run", tasks, 6)
    assert "Say &lt;b&gt;hi&lt;/b&gt; &amp; go" in text
    assert "<b>hi</b>" not in text


def test_the_reader_is_told_of_the_cpu_and_of_the_dequantised_teacher(tasks):
    said = " ".join(notes(tasks))
    assert "slower here, or hardly faster, than none" in said
    assert "Q4_1" in said
    del tasks["teacher"]
    assert "Q4_1" not in " ".join(notes(tasks))


def test_the_headline_is_plain_numbers_that_rules_could_name(tasks):
    found = headline(tasks)
    assert found["measure_pair.acceptance_length.value"] == 1.4
    assert found["measure_pair.quality.ifeval.score"] == 0.5
    assert found["measure_baseline.latency.short.high"] == 110.0
    assert (found["measure_pair.parity.ties"], found["measure_pair.sampled.passed"], found["gate.passed"]) == (1, 1, 0)
    assert all(isinstance(value, int | float) for value in found.values())
    evidence = {name: task.metrics for name, task in tasks.items()}
    assert all(lookup(evidence, path) == value for path, value in found.items())


def test_the_page_is_the_same_every_time(tasks):
    assert render("a run", tasks, 6) == render("a run", tasks, 6)


def model_folder(folder, tensors, config):
    """Write a model folder whose tensors are zeros; ``tensors`` maps a name to its safetensors dtype, shape, bytes."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def test_bytes_of_a_step_come_from_the_headers_of_what_was_served(tmp_path, monkeypatch):
    monkeypatch.setenv("QDFLASH_HOME", str(tmp_path / "home"))
    store = Store(str(tmp_path / "store"))
    bundle = tmp_path / "bundle"
    packed = {
        "model.embed_tokens.weight": ("BF16", [32, 16], 1024),
        "model.layers.0.self_attn.k_proj.weight_packed": ("I32", [8, 2], 64),
        "model.layers.0.self_attn.k_proj.weight_scale": ("BF16", [8, 1], 16),
        "model.layers.0.self_attn.k_proj.weight_shape": ("I64", [2], 16),
    }
    model_folder(bundle, packed, {"hidden_size": 16})
    model_folder(bundle / "draft", {"fc.weight": ("BF16", [16, 48], 1536)}, {"block_size": 4})
    artifact, _ = commit(store, "bundle", "8" * 64, bundle, {"config": {}, "inputs": {}, "metrics": {}})
    sizes = {"short": (10, 6), "long": (90, 10), "long@4": (90, 10)}
    regimes = {
        name: {"input_tokens": read, "output_tokens": written, "concurrency": 4 if "@" in name else 1}
        for name, (read, written) in sizes.items()
    }
    timed = {"latency": {name: {"median_ms": 1.0, "low": 1.0, "high": 1.0, "n": 1} for name in regimes}}
    accepted = {"acceptance_length": {"value": 2.0, "low": 1.5, "high": 2.5, "n": 8}, **timed}
    served = {"model": [artifact.uri]}
    inputs = {
        "measure_target": put(store, tmp_path, "measure", "1", timed, {"latency": regimes}, served),
        "measure_pair": put(store, tmp_path, "measure", "2", accepted, {"latency": regimes, "draft": True}, served),
    }
    tasks = collect(inputs)
    target = {"target linears": 80, "target head": 1024, "target KV": 8 * 2 * 100}
    assert tasks["measure_target"].step_bytes == target
    assert tasks["measure_pair"].step_bytes == {**target, "drafter linears": 1536, "drafter head": 1024}
    cached = [path.stat().st_size for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert max(cached) < (bundle / "model.safetensors").stat().st_size
    rows = {row["metric"]: row["cells"] for row in comparison(tasks)}
    assert rows["bytes moved per step (MB)"] == ["0.002704", "0.005264"]
    assert rows["bytes moved per token (MB)"] == ["0.002704", "0.002632"]
    # so small a model waits for the host alone: 31.22 ms of prefill and five steps, or half as many with a drafter
    assert rows["predicted on an A10G: short (ms)"] == [f"{31.22 + 5 * 3.72:.4g}", f"{31.22 + 2.5 * 7.92:.4g}"]
    assert rows["predicted on an A10G: long (ms)"] == [f"{31.22 + 9 * 3.72:.4g}", f"{31.22 + 4.5 * 7.92:.4g}"]
    assert "predicted on an A10G: long@4 (ms)" not in rows
    text, _ = render("a run", tasks, 6)
    assert "Bytes moved per step" in text
    assert "by up to 61%. The largest part of a step of target + drafter is target KV, 30% of its bytes" in text


def test_a_line_separator_in_an_answer_ends_no_row(tmp_path, monkeypatch):
    monkeypatch.setenv("QDFLASH_HOME", str(tmp_path / "home"))
    store = Store(str(tmp_path / "store"))
    text = "one\u2028two\u2029three\x85four"
    folder = tmp_path / "measured"
    folder.mkdir()
    (folder / "samples.jsonl").write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n", encoding="utf-8")
    manifest = {"config": {}, "inputs": {}, "metrics": {}, "seconds": 1.5, "versions": {}}
    measured, _ = commit(store, "qad", "8" * 64, folder, manifest)
    assert collect({"qad": Input(measured.uri)})["qad"].samples == [{"text": text}]
