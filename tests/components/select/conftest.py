"""Tiny models on a busy machine: threads wait for each other far longer than they compute."""

from tests.components.qad.conftest import _one_thread

__all__ = ["_one_thread"]
