"""``python -m components.serving.weights ARTIFACT FOLDER``: fetch a bundle and check every file before it is served.

The files are links into the cache (``QDFLASH_HOME``), which has to be on the folder's file system: no byte is held
twice. A second call, after a restart, checks and links again.
"""

import os
import shutil
import sys
from pathlib import Path

from components.contract.context import Input
from components.contract.errors import StageError, one_line


def place(uri: str, folder: Path) -> None:
    """Make ``folder`` hold exactly the verified files of the artifact at ``uri``.

    Raises :class:`~components.contract.errors.UserError` when nothing is committed there or a file's bytes are not
    those of its manifest.
    """
    view = Input(uri).path
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(view, folder, copy_function=os.link)


if __name__ == "__main__":
    try:
        place(sys.argv[1], Path(sys.argv[2]))
    except StageError as fault:
        print(one_line(fault), file=sys.stderr)
        raise SystemExit(fault.exit_code) from fault
