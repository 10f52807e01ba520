"""The trained latents beside the grid they were trained on."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from threading import Lock

import torch
from torch import Tensor

from components.checkpoint.census import skeleton, stored_modules
from components.checkpoint.config import declared_grids
from components.checkpoint.grid import PACKED, SCALE, Quantized, packed_blocks, read_module
from components.checkpoint.tensors import Tensors
from components.contract.errors import UserError
from components.contract.log import Log

BLOCK = 1 << 20
"""Latents that are packed at a time: few enough for the cache, many for what an operation costs beside."""


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
        self._blank(module, original)
        return self._selected[f"{module}.weight"]

    def _blank(self, module: str, original: Quantized) -> Tensor:
        """Return what :meth:`latent` does, but without its values."""
        where = f"{self._selected.file(f'{module}.weight')}: {module}"
        latent, scales = self._selected.blank(f"{module}.weight"), self._selected.read(f"{module}.{SCALE}")
        if latent.shape != original.codes.shape or latent.dtype not in (torch.float32, torch.bfloat16):
            raise UserError(f"{where}: latents are {latent.dtype} {list(latent.shape)}; they do not fit the student's")
        if not same_bytes(scales, original.scales):
            raise UserError(f"{where}: scales differ from the student's; the grid must stay frozen in training")
        return latent

    def packed(self, log: Log) -> Iterator[tuple[str, Quantized]]:
        """Yield each module on the student's scales; its words are made of latents, or carried, as they are written.

        What is wrong with a module is raised here, or where its words are made.
        """
        lock, done = Lock(), itertools.count(1)

        def counted(words: Callable[[], Iterator[Tensor]], module: str) -> Iterator[Tensor]:
            yield from words()
            with lock:
                log.progress(next(done), len(self.modules), module=module)

        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # torch's own would spin between these short operations, beside the writer's
        try:
            for module in self.modules:
                original = self.original(module, codes=False)
                if module in self.trained:
                    words = partial(self._words, module, original, self._blank(module, original))
                else:
                    words = partial(self.student.blocks, f"{module}.{PACKED}")
                stored = self.student.stream(f"{module}.{PACKED}")
                made = replace(stored, parts=partial(counted, words, module))
                yield module, replace(original, words=made)
        finally:
            torch.set_num_threads(threads)

    def _words(self, module: str, original: Quantized, latent: Tensor) -> Iterator[Tensor]:
        columns = original.codes.shape[1]
        height = max(1, BLOCK // columns)
        name = f"{module}.weight"
        blocks = self._selected.blocks(name, height * columns * latent.itemsize)
        pairs = zip(
            (block.view(latent.dtype).view(-1, columns) for block in blocks),
            original.scales.split(height),
            strict=True,
        )
        try:
            yield from packed_blocks(pairs, original.bits)
        except ValueError as error:
            raise UserError(f"{self._selected.file(name)}: {module}: {error}; training diverged") from error


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Compare dtype, shape and bytes: NaNs and signed zeros count as what they are."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
