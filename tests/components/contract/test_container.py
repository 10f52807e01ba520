"""The container components, judged by KFP's own readers."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from kfp import dsl
from kfp.local import executor_output_utils
from kfp.pipeline_spec import pipeline_spec_pb2

from components.contract.container import artifact_inputs
from components.contract.invocation import Invocation, invocation
from components.contract.stage import STAGES, load
from components.store.artifact import commit, read_manifest
from components.store.backend import Store

IMAGE = "registry.example/image@sha256:" + "0" * 64


@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_is_a_component_with_its_ports(stage: str) -> None:
    argv = ["-m", f"components.{stage}"]
    for port in load(stage).INPUTS:
        argv += ["--input", f"{port}=s3://bucket/any/{'0' * 64}"]
    component = importlib.import_module(f"components.{stage}.component").component(IMAGE, argv)
    inputs = component.component_spec.inputs or {}
    assert list(inputs) == list(load(stage).INPUTS)
    kinds = {name: one.type for name, one in component.component_spec.outputs.items()}
    shown = {"page": "system.HTML@0.0.1", "metrics": "system.Metrics@0.0.1"} if stage == "report" else {}
    assert kinds == {"artifact": "system.Artifact@0.0.1", **shown}
    assert component.component_spec.implementation.container.args[: len(argv)] == argv


def test_a_repeated_port_becomes_numbered_inputs_and_plain_files_none() -> None:
    one, two, file = f"s3://b/x/{'1' * 64}", f"s3://b/x/{'2' * 64}", f"s3://b/_files/{'3' * 64}/a.jsonl"
    argv = [
        "--input",
        f"stages={one}",
        "--input",
        f"stages={two}",
        "--input",
        f"files={file}",
        "--input",
        f"model={one}",
    ]
    assert artifact_inputs(argv) == {"stages_0": one, "stages_1": two, "model": one}


def test_components_chain_in_a_pipeline_of_ones_own() -> None:
    from components.gate.component import component as gate
    from components.report.component import component as report

    verdict = f"s3://b/gate/{'0' * 64}"
    first = gate(IMAGE, ["-m", "components.gate", "--output", verdict])
    second = report(IMAGE, ["-m", "components.report", "--input", f"stages={verdict}"])

    @dsl.pipeline
    def mine() -> None:
        second(stages=first().output)

    tasks = mine.pipeline_spec.root.dag.tasks
    assert list(tasks["report"].dependent_tasks) == ["gate"]


def outputs(component: Any, call: Invocation, folder: Path) -> tuple[dict[str, dsl.Artifact], Path]:
    """Run a stage as KFP's launcher does; return what KFP reads of its outputs, and the folder of what is uploaded.

    Types are those of the compiled component, not of what the stage says.
    """
    (spec,) = component.pipeline_spec.components.values()
    argv, made, executor = list(call.argv), {}, folder / "executor.json"
    for name, kind in spec.output_definitions.artifacts.items():
        uri = f"s3://kfp/v2/{name}"
        argv += ["--executor-artifact", name, str(folder / "upload" / name), uri]
        schema = {"schemaTitle": kind.artifact_type.schema_title}
        made[name] = {"artifacts": [{"name": name, "uri": uri, "type": schema}]}
    subprocess.run([sys.executable, *argv, "--executor-output", str(executor)], check=True, timeout=60)
    given = {"outputs": {"artifacts": made, "outputFile": str(executor)}}
    message = json_format.ParseDict(given, pipeline_spec_pb2.ExecutorInput())
    return executor_output_utils.get_outputs_for_task(message, spec), folder / "upload"


def test_executor_output_is_what_kfp_reads(tmp_path: Path, home: Path) -> None:
    """A stage run by its command line hands KFP the copy of its manifest, with digest and address as metadata."""
    store = Store(str(tmp_path / "store"))
    evidence = tmp_path / "evidence"
    evidence.mkdir()
    (evidence / "x").write_text("x")
    measured = {"metrics": {"latency": {"short": {"median_ms": 7.5, "low": 7, "high": 8, "n": 3}}}, "config": {}}
    rest = {"inputs": {}, "seconds": 1.0, "versions": {}}
    commit(store, "measure", "a" * 64, evidence, {**measured, **rest})
    rule = {"name": "fast", "metric": "measure_pair.latency.short.median_ms", "at_most": 9}
    uri = store.uri(f"measure/{'a' * 64}")

    judge = load("gate").Config(names=["measure_pair"], rules=[rule])
    call = invocation("gate", store.url, judge, {"measurements": [uri]})
    component = importlib.import_module("components.gate.component").component(IMAGE, call.argv)
    found, uploads = outputs(component, call, tmp_path / "gate")
    assert found["artifact"].uri == "s3://kfp/v2/artifact"
    assert found["artifact"].metadata == {"digest": call.digest, "uri": call.uri, "stage": "gate"}
    committed = read_manifest(store, "gate", call.digest)
    assert committed
    assert json.loads((uploads / "artifact").read_text()) == committed.manifest

    show = load("report").Config(title="smol", names=["measure_pair", "gate"])
    call = invocation("report", store.url, show, {"stages": [uri, call.uri]})
    component = importlib.import_module("components.report.component").component(IMAGE, call.argv)
    found, uploads = outputs(component, call, tmp_path / "report")
    committed = read_manifest(store, "report", call.digest)
    assert committed
    assert isinstance(found["page"], dsl.HTML)
    assert found["page"].metadata["uri"] == store.uri(committed.key("index.html"))
    assert (uploads / "page").read_bytes() == store.read(committed.key("index.html"))
    assert "<h1>smol</h1>" in (uploads / "page").read_text()
    assert isinstance(found["metrics"], dsl.Metrics)
    median = "measure_pair.latency.short"
    told = {f"{median}.median_ms": 7.5, f"{median}.low": 7, f"{median}.high": 8, f"{median}.n": 3, "gate.passed": 1}
    assert found["metrics"].metadata == told


def test_an_artifact_of_a_store_below_a_folder_that_is_called_files_is_no_plain_file() -> None:
    uri = f"s3://b/_files/runs/ptq/{'1' * 64}"
    assert artifact_inputs(["--input", f"model={uri}"]) == {"model": uri}
