"""Room on a disk for files that are written through memory."""

import errno
import os
from pathlib import Path

from components.contract.errors import UserError


def reserve(file: Path, start: int, size: int, what: str) -> None:
    """Take the blocks of ``size`` bytes from ``start`` of a file that exists.

    A write through memory that finds the disk full ends the process with a signal and no word.

    Raises:
        UserError: there is no room; ``what`` says for what, and what else to do.
    """
    with file.open("r+b") as opened:
        try:
            os.posix_fallocate(opened.fileno(), start, size)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise UserError(f"{file}: disk full, no room for {what}") from error
