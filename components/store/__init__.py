"""Artifacts in an object store or a plain folder: commit once, verify on read, resume work in progress."""

from components.store.artifact import Artifact, commit, read_manifest
from components.store.backend import Store

__all__ = ["Artifact", "Store", "commit", "read_manifest"]
