"""Declaration of the ``ptq`` stage."""

import re
from typing import Any, Literal

from pydantic import Field, field_validator

from components.contract.context import Inputs, Output
from components.contract.digest import StageConfig
from components.contract.errors import UserError
from components.contract.stage import Port

ROLE = "train"
VERSION = 2
INPUTS = {
    "model": Port("BF16 model folder"),
    "chats": Port("regenerated chats to calibrate on; read by method gptq only", optional=True),
}
OUTPUTS = {
    "config.json": "model config with its quantization_config",
    "model*.safetensors": "packed codes, scales and shapes of the quantised linears; everything else as in the model",
    "tokenizer*": "tokenizer, chat template and generation files, as in the model",
}


class Head(StageConfig):
    """The output head's own grid."""

    bits: Literal[4, 8] = Field(8, description="Bits of a code; vLLM serves 8 on GPUs alone")
    group_size: Literal[32, 64, 128] = Field(32, description="Input columns that share one scale")


class Config(StageConfig):
    """How the INT4 checkpoint is made."""

    method: Literal["rtn", "gptq"] = Field("rtn", description="rtn rounds without data; gptq calibrates on the chats")
    group_size: Literal[32, 64, 128] = Field(32, description="Input columns that share one scale")
    ignore: list[str] = Field(
        [r"re:.*lm_head$", r"re:.*linear_attn\.in_proj_[ab]$", r"re:.*visual.*", r"re:^mtp\..*"],
        description="Linears that stay BF16: module names, or regular expressions after re:",
    )
    head: Head | None = Field(
        None, description="Quantise the output head too, whatever ignore says; where it is tied, this unties it"
    )
    calibration_rows: int = Field(128, description="Chats that gptq calibrates on, the first of the input", ge=1)
    calibration_tokens: int = Field(2048, description="A calibration chat is cut to this many tokens", ge=16)
    damping: float = Field(0.01, description="gptq: share of the Hessian's mean diagonal added to it", gt=0, lt=1)

    @field_validator("ignore")
    @classmethod
    def _expressions(cls, ignore: list[str]) -> list[str]:
        for pattern in ignore:
            try:
                re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
            except re.error as error:
                raise ValueError(f"{pattern}: no regular expression ({error})") from error
        return ignore


def run(config: Config, inputs: Inputs, output: Output) -> dict[str, Any]:
    """Quantise the model and write the checkpoint; return census and errors."""
    from components.checkpoint.census import check_fused, compare, unquantized
    from components.checkpoint.config import quantization, read_config
    from components.checkpoint.grid import quantized_modules
    from components.checkpoint.load import load_config, load_model
    from components.checkpoint.tensors import Tensors
    from components.checkpoint.unpack import passthrough_tensors
    from components.checkpoint.write import save_quantized, untied_config
    from components.ptq.calibrate import calibration_batches
    from components.ptq.compress import check_groups, choose_scales, quantized_linears, summarise, with_head

    folder = inputs["model"].path
    if quantization(read_config(folder)) is not None:
        raise UserError(f"{folder}/config.json: the model is quantised already; name a BF16 model")
    batches = None
    if config.method == "gptq":
        if "chats" not in inputs:
            raise UserError("--input chats=…: method gptq calibrates on chats; bind them or use method rtn")
        vocabulary = load_config(folder).get_text_config().vocab_size
        batches = calibration_batches(
            inputs["chats"].path, config.calibration_rows, config.calibration_tokens, vocabulary
        )

    tensors = Tensors(folder)
    with output.timed("load"):
        model = load_model(folder)
    ignore = with_head(model, config.ignore) if config.head else config.ignore
    head = (config.head.bits, config.head.group_size) if config.head else None
    check_groups(model, config.group_size, ignore, folder, head and head[1])
    with output.timed(config.method):
        choose_scales(model, config.group_size, ignore, batches, config.damping, head)
    linears = quantized_linears(model, tensors)
    dense = unquantized(folder, tensors, linears)
    check_fused(folder, linears, dense)

    errors: dict[str, float] = {}
    weights = {f"{name}.weight" for name in linears}
    with output.timed("write"):
        save_quantized(
            output.path,
            modules=summarise(linears, tensors, errors, output.log),
            others=((name, tensor) for name, tensor in passthrough_tensors(tensors) if name not in weights),
            config=untied_config(read_config(folder)) if config.head else read_config(folder),
            ignore=dense,
            sidecars=folder,
        )
    compare(quantized_modules(Tensors(output.path)), linears, f"census of {output.path}")
    by_kind: dict[str, list[float]] = {}
    for name, error in errors.items():
        by_kind.setdefault(name.rpartition(".")[2], []).append(error)
    worst = max(errors, key=lambda name: errors[name])
    return {
        "quantized": len(linears),
        "dense_linears": dense,
        "calibration_rows": len(batches) if batches is not None else 0,
        "relative_error": sum(errors.values()) / len(errors),
        "relative_error_by_kind": {kind: sum(many) / len(many) for kind, many in sorted(by_kind.items())},
        "worst_module": worst,
        "worst_relative_error": errors[worst],
    }
