"""The trained latents beside the grid they were trained on."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import islice

import torch
from torch import Tensor

from components.checkpoint.census import skeleton, stored_modules
from components.checkpoint.config import declared_grids
from components.checkpoint.grid import SCALE, Quantized, pack_latents, read_module
from components.checkpoint.tensors import Tensors
from components.contract.errors import UserError
from components.contract.log import Log

WORKERS = 2


class Latents:
    """Latents of the modules that trained; the student's own codes for those that the text model does not have.

    Raises:
        UserError: a latent of a module that the student does not quantise, a module of the model without a latent, a
            shape or dtype that does not fit, a NaN, or scales whose bytes are not the student's; the module is named.
    """

    def __init__(self, selected: Tensors, student: Tensors, modules: list[str], dense: list[str]) -> None:
        self.student = student
        self.modules = modules
        self.dense = dense
        self._selected = selected
        self._grids = declared_grids(student.folder)
        given = {name.rpartition(".")[0] for name in selected}
        expected = {f"{module}.{kind}" for module in given for kind in ("weight", SCALE)}
        if odd := set(selected) ^ expected:
            raise UserError(f"{selected.folder}: {min(odd)}: every module needs a weight and a {SCALE}, nothing else")
        if unknown := given - set(modules):
            raise UserError(f"{selected.folder}: {min(unknown)} is not quantised in {student.folder}")
        trainable = stored_modules(skeleton(student.folder), student) & set(modules)
        if missing := trainable - given:
            raise UserError(f"{selected.folder}: no latents of {min(missing)}; {len(missing)} modules are missing")
        self.trained = sorted(given)
        self.carried = sorted(set(modules) - given)

    def original(self, module: str, codes: bool = True) -> Quantized:
        """Return the student's codes and scales; the codes are only a shape where they are not needed."""
        return read_module(self.student, module, self._grids, codes)

    def latent(self, module: str, original: Quantized) -> Tensor:
        """Return the tensor that the training forward quantised, checked against the student's grid."""
        where = f"{self._selected.file(f'{module}.weight')}: {module}"
        latent, scales = self._selected[f"{module}.weight"], self._selected[f"{module}.{SCALE}"]
        if latent.shape != original.codes.shape or latent.dtype not in (torch.float32, torch.bfloat16):
            raise UserError(f"{where}: latents are {latent.dtype} {list(latent.shape)}; they do not fit the student's")
        if not same_bytes(scales, original.scales):
            raise UserError(f"{where}: scales differ from the student's; the grid must stay frozen in training")
        return latent

    def packed(self, log: Log) -> Iterator[tuple[str, Quantized]]:
        """Yield each module's codes, trained (as words) or carried, on the student's scales.

        Two modules are made at a time, each by one thread: torch's own threads would meet after every short operation.
        """
        threads, left = torch.get_num_threads(), iter(self.modules)
        with ThreadPoolExecutor(WORKERS, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            coming = deque((module, pool.submit(self._packed, module)) for module in islice(left, WORKERS))
            for done in range(1, len(self.modules) + 1):
                module, made = coming.popleft()
                quantized = made.result()
                coming.extend((after, pool.submit(self._packed, after)) for after in islice(left, 1))
                yield module, quantized
                log.progress(done, len(self.modules), module=module)
        torch.set_num_threads(threads)

    def _packed(self, module: str) -> Quantized:
        original = self.original(module, codes=module in self.carried)
        if module in self.carried:
            return original
        latent = self.latent(module, original)
        try:
            return replace(original, words=pack_latents(latent, original.scales, original.bits))
        except ValueError as error:
            file = self._selected.file(f"{module}.weight")
            raise UserError(f"{file}: {module}: {error}; training diverged") from error


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Compare dtype, shape and bytes: NaNs and signed zeros count as what they are."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
