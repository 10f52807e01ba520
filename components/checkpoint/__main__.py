"""``python -m components.checkpoint FOLDER DESTINATION``: write the dense BF16 twin of a W4A16 folder."""

import sys
from pathlib import Path

from components.checkpoint.unpack import unpack
from components.contract.errors import StageError, UserError, of_machine, one_line

try:
    folder, destination = map(Path, sys.argv[1:])
    unpack(folder, destination)
except (StageError, OSError) as error:
    print(one_line(of_machine(error) or error), file=sys.stderr)
    raise SystemExit(UserError.exit_code) from error
