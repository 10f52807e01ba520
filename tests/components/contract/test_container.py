"""The container components, judged by KFP's own readers."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import json_format
from kfp import dsl
from kfp.local import executor_output_utils
from kfp.pipeline_spec import pipeline_spec_pb2

from components.contract.container import artifact_inputs
from components.contract.invocation import invocation
from components.contract.stage import STAGES, load
from components.store.artifact import read_manifest
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
    assert list(component.component_spec.outputs) == ["artifact"]
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


def test_executor_output_is_what_kfp_reads(tmp_path: Path, home: Path) -> None:
    """A stage run by its command line hands KFP the copy of its manifest, with digest and address as metadata."""
    store = Store(str(tmp_path / "store"))
    config = load("gate").Config(names=["m"], rules=[{"name": "size", "metric": "m.size", "at_least": 1}])
    evidence = tmp_path / "evidence"
    evidence.mkdir()
    (evidence / "x").write_text("x")
    from components.store.artifact import commit

    commit(store, "measure", "a" * 64, evidence, {"metrics": {"size": 1}})
    call = invocation("gate", store.url, config, {"measurements": [store.uri(f"measure/{'a' * 64}")]})
    output, copy, address = tmp_path / "out" / "executor.json", tmp_path / "kfp" / "artifact", "s3://kfp/v2/artifact"
    kfp = ["--executor-output", str(output), "--executor-artifact", str(copy), address]
    subprocess.run([sys.executable, *call.argv, *kfp], check=True, timeout=60)

    executor_input = {
        "outputs": {
            "artifacts": {
                "artifact": {
                    "artifacts": [{"name": "artifact", "uri": address, "type": {"schemaTitle": "system.Artifact"}}]
                }
            },
            "outputFile": str(output),
        }
    }
    component = importlib.import_module("components.gate.component").component(IMAGE, call.argv)
    found = executor_output_utils.get_outputs_for_task(
        json_format.ParseDict(executor_input, pipeline_spec_pb2.ExecutorInput()),
        component.pipeline_spec.components["comp-gate"],
    )
    artifact = found["artifact"]
    assert artifact.uri == address
    assert artifact.metadata == {"digest": call.digest, "uri": call.uri, "stage": "gate"}
    committed = read_manifest(store, "gate", call.digest)
    assert committed
    assert json.loads(copy.read_text()) == committed.manifest


def test_an_artifact_of_a_store_below_a_folder_that_is_called_files_is_no_plain_file() -> None:
    uri = f"s3://b/_files/runs/ptq/{'1' * 64}"
    assert artifact_inputs(["--input", f"model={uri}"]) == {"model": uri}
