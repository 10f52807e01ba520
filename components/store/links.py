"""Files that two folders share."""

import os
import shutil
from collections.abc import Set
from pathlib import Path


def link(source: Path, destination: Path, leave_out: Set[str]) -> None:
    """Hard-link the files below ``source``, or copy where file systems differ, but not those of ``leave_out``."""
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        if not path.is_file() or relative.parts[0] in leave_out:
            continue
        copy = destination / relative
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, copy)
        except OSError:
            shutil.copyfile(path, copy)
