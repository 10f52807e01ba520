"""The student: the INT4 checkpoint's model with its quantised linears made trainable on their own grid."""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from components.checkpoint.census import check_fused, unquantized
from components.checkpoint.config import declared_grids, quantization, read_config
from components.checkpoint.grid import PACKED, SCALE, Quantized, iterate_grid, quantized_modules
from components.checkpoint.load import load_config, load_model
from components.checkpoint.tensors import Tensors
from components.contract.errors import UserError
from components.qad.grid import QuantizedLinear

FILE = "latents.safetensors"


class Student:
    """The model, its :class:`QuantizedLinear` layers by their names in the INT4 checkpoint, and the start's codes.

    Everything but the layers' latents is the INT4 checkpoint's and frozen. MTP modules, which transformers does not
    load, take no part.
    """

    def __init__(self, model: PreTrainedModel, grid: Iterable[tuple[str, Quantized]], dtype: torch.dtype) -> None:
        """Replace the linears of ``model`` that ``grid`` names, on the device where they are.

        Raises:
            UserError: grid and model disagree, naming the module.
        """
        self.model = model.requires_grad_(False)
        self.layers: dict[str, QuantizedLinear] = {}
        self.start: dict[str, Tensor] = {}
        modules = dict(model.named_modules())
        for name, quantized in grid:
            if name.startswith("mtp."):
                continue
            inner = name.replace("model.language_model.", "model.", 1)
            linear = modules.get(name, modules.get(inner))
            if not isinstance(linear, torch.nn.Linear) or linear.weight.shape != quantized.codes.shape:
                shape, folder = list(quantized.codes.shape), model.config._name_or_path
                raise UserError(f"{folder}: {name} is quantised as {shape}, but the model has no such linear")
            device = linear.weight.device
            there = replace(quantized, codes=quantized.codes.to(device), scales=quantized.scales.to(device))
            self.layers[name] = QuantizedLinear(there, linear.bias, dtype)
            self.start[name] = quantized.codes.cpu()
            model.set_submodule(name if name in modules else inner, self.layers[name])

    def head(self) -> Tensor:
        """Return the output head's weight [vocabulary, hidden] as the forward has it, differentiable if it trains."""
        module = self.model.get_output_embeddings()
        weight: Tensor = module.quantized() if isinstance(module, QuantizedLinear) else module.weight.detach()
        return weight

    @classmethod
    def open(cls, folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> "Student":
        """Read an INT4 checkpoint.

        Raises:
            UserError: it is damaged, or its grid and its model disagree, naming the module.
        """
        model = load_model(folder, dtype).to(device)  # type: ignore[arg-type]
        return cls(model, iterate_grid(Tensors(folder)), dtype)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Within, every weight is quantised once and not once per forward."""
        try:
            for layer in self.layers.values():
                layer.freeze(True)
            yield
        finally:
            for layer in self.layers.values():
                layer.freeze(False)

    def recompute_activations(self) -> None:
        """Keep each decoder layer's input alone for the backward pass, and compute the rest again there."""
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for module in self.model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                module.training = True  # what turns it on; its parts stay in eval mode, so nothing drops out

    def frozen_digest(self) -> str:
        """Return the sha256 of everything that does not train, by name: parameters and buffers, scales among them."""
        masters = {id(master) for master in self.masters()}
        parts = (*self.model.named_parameters(), *self.model.named_buffers())
        digest = hashlib.sha256()
        for name, tensor in parts:
            if id(tensor) not in masters:
                digest.update(name.encode())
                digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def masters(self) -> list[torch.nn.Parameter]:
        """Return all that trains: the fp32 masters, in the checkpoint's order."""
        return [layer.weight for layer in self.layers.values()]

    def codes_changed(self) -> float:
        """Return the share of all codes that differ from the start's, 0 to 1."""
        changed = sum(int((layer.codes.cpu() != self.start[name]).sum()) for name, layer in self.layers.items())
        return changed / sum(codes.numel() for codes in self.start.values())

    def save(self, folder: Path) -> None:
        """Write ``latents.safetensors``: the latents as the forward quantises them, the scales as stored."""
        tensors = {}
        for name, layer in self.layers.items():
            tensors[f"{name}.weight"] = layer.latents.contiguous()
            tensors[f"{name}.weight_scale"] = layer.weight_scale.contiguous()
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / FILE)

    def load(self, folder: Path) -> None:
        """Take the latents of a checkpoint.

        Raises:
            UserError: it is damaged, holds NaN or infinity, or is of another grid: names, shapes, types or scales
                differ.
        """
        path = folder / FILE
        try:
            opened = safe_open(path, "pt")
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: missing, or no safetensors file ({error}); train it again") from error
        with opened as stored:
            expected = {f"{name}.{kind}" for name in self.layers for kind in ("weight", "weight_scale")}
            if odd := sorted(expected ^ set(stored.keys())):
                raise UserError(f"{path}: not a checkpoint of this student; {odd[0]} is in only one of them")
            for name, layer in self.layers.items():
                latents, scales = stored.get_tensor(f"{name}.weight"), stored.get_tensor(f"{name}.weight_scale")
                if latents.shape != layer.weight.shape or latents.dtype != layer.dtype:
                    found = f"{latents.dtype} {list(latents.shape)}"
                    raise UserError(f"{path}: {name} is {found}, not {layer.dtype} {list(layer.weight.shape)}")
                if scales.dtype != layer.weight_scale.dtype or not torch.equal(scales, layer.weight_scale.cpu()):
                    raise UserError(
                        f"{path}: {name} has other scales than the student; it was trained on another grid"
                    )
                if not torch.isfinite(latents).all():
                    raise UserError(f"{path}: {name} holds NaN or infinity; no code stands for them")
                layer.weight.data.copy_(latents)


def check_pair(teacher: Path, student: Path, vocabulary: int) -> None:
    """Compare two model folders and the sequences' vocabulary size by configs and headers alone: it takes no time.

    Raises:
        UserError: the teacher is quantised itself, or they differ in vocabulary, shape (of a quantised module too) or,
            where the student's head is not quantised, its tying; or the student's scales are not of its own dtype.
    """
    if quantization(read_config(teacher)) is not None:
        raise UserError(f"{teacher}: the teacher is quantised; its dense model is needed")
    ours, theirs = (_text(folder) for folder in (student, teacher))
    packed = Tensors(student)
    tying = () if f"lm_head.{PACKED}" in packed else ("tie_word_embeddings",)
    for field in ("vocab_size", "hidden_size", "num_hidden_layers", *tying, "model_type"):
        if ours.get(field) != theirs.get(field):
            raise UserError(
                f"{student}: {field} is {ours.get(field)}, the teacher's is {theirs.get(field)}; not a pair"
            )
    if ours["vocab_size"] != vocabulary:
        raise UserError(f"sequences of a vocabulary of {vocabulary}, models of {ours['vocab_size']}: other tokenizers")
    _check_shapes(Tensors(teacher), packed, declared_grids(student))
    _check_scales(packed, ours.get("dtype"))
    modules = quantized_modules(packed)
    check_fused(student, modules, unquantized(student, packed, modules))


def _check_shapes(dense: Tensors, packed: Tensors, grids: set[tuple[int, int]]) -> None:
    """Demand that each quantised module has its dense one's shape; a tied head or an MTP module may have none."""
    for module in quantized_modules(packed):
        if f"{module}.weight" in dense and f"{module}.{SCALE}" in packed:
            shape = dense.shape(f"{module}.weight")
            rows, columns = shape[0], shape[-1]
            found = packed.shape(f"{module}.{PACKED}"), packed.shape(f"{module}.{SCALE}")
            if found not in [((rows, -(-columns * bits // 32)), (rows, columns // group)) for bits, group in grids]:
                raise UserError(
                    f"{packed.file(f'{module}.{PACKED}')}: {module} has codes {list(found[0])} and scales "
                    f"{list(found[1])}, which no grid of the teacher's {list(shape)} has; not a pair"
                )


def _check_scales(packed: Tensors, dtype: str | None) -> None:
    """Demand that scales are of the student's own 16 bits: engines round others to it, and training does not."""
    for module in quantized_modules(packed):
        name = f"{module}.{SCALE}"
        found = str(packed.blank(name).dtype).removeprefix("torch.")
        if dtype in ("bfloat16", "float16") and found != dtype:
            raise UserError(
                f"{packed.file(name)}: {name} is {found}, which engines round to the model's {dtype}: "
                f"they would not serve what was trained; store scales as {dtype}"
            )


def _text(folder: Path) -> dict[str, Any]:
    """Return a text model's fields: its config.json's, and the defaults of those that it leaves out."""
    config = read_config(folder)
    return {**load_config(folder).get_text_config().to_dict(), **config, **config.get("text_config", {})}
