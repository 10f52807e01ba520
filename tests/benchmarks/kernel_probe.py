"""Which W4A16 kernels of vLLM take the linears of SmolLM2's drafter here: ``kernel_probe.py --work FOLDER``."""

import argparse
import json
from pathlib import Path
from typing import Any


def probe(work: Path) -> None:
    """Ask every kernel of this platform which of the drafter's linears it takes; write ``kernels.json``."""
    import torch
    from vllm.model_executor.kernels.linear import _POSSIBLE_KERNELS, choose_mp_linear_kernel
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
    from vllm.platforms import current_platform
    from vllm.scalar_type import scalar_types

    shapes = {"qkv": (576, 960), "o": (576, 576), "gate_up": (576, 3072), "down": (1536, 576), "fc": (2880, 576)}
    found: dict[str, Any] = {}
    for group in (32, 64, 128):
        for name, shape in shapes.items():
            config = MPLinearLayerConfig(shape, shape, scalar_types.uint4b8, torch.bfloat16, group, False)
            says = {}
            for kernel in _POSSIBLE_KERNELS[current_platform._enum]:
                try:
                    says[kernel.__name__] = kernel.can_implement(config)
                except Exception as error:
                    says[kernel.__name__] = (False, repr(error))
            try:
                chosen = choose_mp_linear_kernel(config).__name__
            except ValueError:
                chosen = "none"
            found[f"group {group}, {name} {shape[0]}x{shape[1]}"] = {"chosen": chosen, "says": says}
    (work / "kernels.json").write_text(json.dumps(found, indent=1))
    for name, one in found.items():
        print(name, one["chosen"], {key: ok or why for key, (ok, why) in one["says"].items()}, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    probe(parser.parse_args().work)
