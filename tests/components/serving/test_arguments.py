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


@pytest.mark.parametrize(
    "env",
    [
        {"VLLM_A=B": "1"},
        {"": "1"},
        {"OMP_A": "\0"},
        {"LD_PRELOAD": "evil.so"},
        {"PYTHONPATH": "."},
        {"TRITON_CACHE_DIR": "/mnt/models/cache"},
        {"VLLM_API_KEY": "open-sesame"},
        {"VLLM_SERVER_DEV_MODE": "1"},
        {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},
        {"HF_TOKEN": "x"},
        {"QDFLASH_SUMS": "x"},
    ],
    ids=str,
)
def test_variables_that_load_open_or_carry_something_are_refused(env: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        Profile(env=env)


def test_a_name_is_no_argument() -> None:
    for name in ("--trust-remote-code", "-O3", "", "a b", "a\n--trust-remote-code"):
        with pytest.raises(ValidationError, match="served_model_name"):
            Serving(served_model_name=name)
    with pytest.raises(ValidationError, match="attention_backend"):
        Profile(attention_backend="--trust-remote-code")
    assert Serving(served_model_name="Qwen/Qwen3.5-4B:qad_1").served_model_name


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(ValidationError):
        Profile.model_validate({"max_num_sequences": 1})
