import json
from pathlib import Path

import pytest
from pydantic import ValidationError

from components.contract.errors import UserError
from components.serving.arguments import arguments, environment
from components.serving.profiles import A10G, CPU, PROFILES, Profile, Serving, read_serving, write_serving


def test_latency_profile_of_an_a10g_spelled_out(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"block_size": 16}))
    profile = A10G.model_copy(update={"cudagraph_capture_sizes": (1, 16)})
    argv = arguments(profile, "/models/pair", tmp_path, served_model_name="pair", host="0.0.0.0", port=8080)
    speculation = {
        "method": "dflash",
        "model": str(tmp_path),
        "num_speculative_tokens": 15,
        "attention_backend": "FLASH_ATTN",
    }
    assert " ".join(argv[:-1]) == (
        "vllm serve /models/pair --served-model-name pair --host 0.0.0.0 --port 8080 --dtype auto "
        "--max-num-seqs 1 --no-enable-prefix-caching --max-model-len 8704 --max-num-batched-tokens 16384 "
        "--gpu-memory-utilization 0.78 --attention-backend FLASH_ATTN --language-model-only "
        "--cudagraph-capture-sizes 1 16 --speculative-config"
    )
    assert json.loads(argv[-1]) == speculation


def test_no_speculation_without_a_drafter() -> None:
    assert "--speculative-config" not in arguments(CPU, "/models/target")


def test_explicit_number_of_speculative_tokens_needs_no_drafter_file() -> None:
    argv = arguments(Profile(num_speculative_tokens=7), "/m", "/not/there")
    assert json.loads(argv[-1])["num_speculative_tokens"] == 7


@pytest.mark.parametrize("config", ["{}", '{"block_size": 1}', '{"block_size": "8"}'])
def test_drafter_without_a_usable_block_size(tmp_path: Path, config: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(UserError, match="block_size"):
        arguments(CPU, "/m", tmp_path)
    with pytest.raises(UserError, match="not a drafter folder"):
        arguments(CPU, "/m", tmp_path / "missing")


def test_servers_stay_offline_and_keep_the_profile_s_variables() -> None:
    assert environment(CPU) == {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "TORCH_COMPILE_DISABLE": "1",
        **CPU.env,
    }


def test_compilation_stays_on_where_graphs_are_captured() -> None:
    assert "TORCH_COMPILE_DISABLE" not in environment(A10G)


def test_serving_file_round_trip(tmp_path: Path) -> None:
    serving = Serving(served_model_name="pair", profiles={**PROFILES, "mine": Profile(max_num_seqs=8)})
    write_serving(tmp_path, serving)
    assert read_serving(tmp_path) == serving


def test_wrong_serving_files_name_the_fault(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a bundle"):
        read_serving(tmp_path)
    (tmp_path / "serving.yaml").write_text("profiles: {cpu: {max_seqs: 3}}")
    with pytest.raises(UserError, match=r"profiles\.cpu\.max_seqs: unknown field"):
        read_serving(tmp_path)
    for data in (b"profiles: [", b"served_model_name: caf\xe9", b"served_model_name: 2020-13-45"):
        (tmp_path / "serving.yaml").write_bytes(data)
        with pytest.raises(UserError, match=r"serving\.yaml: not YAML"):
            read_serving(tmp_path)
    with pytest.raises(UserError, match="choose one of a10g, a10g-emulated, a10g-throughput, cpu, h200"):
        Serving().profile("tpu")


@pytest.mark.parametrize("env", [{"A=B": "1"}, {"": "1"}, {"A": "\0"}])
def test_an_environment_that_no_process_can_have_is_refused(env: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        Profile(env=env)


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(ValidationError):
        Profile.model_validate({"max_num_sequences": 1})
