"""The ``qdflash`` command as a user has it."""

import subprocess
import sys
from pathlib import Path

QDFLASH = str(Path(sys.executable).with_name("qdflash"))


def qdflash(environment, *words, check=True):
    result = subprocess.run(
        [QDFLASH, *words], env=environment, capture_output=True, text=True, timeout=1500, check=False
    )
    if check and result.returncode != 0:
        raise AssertionError(
            f"qdflash {' '.join(words)} ended with {result.returncode}\n{result.stdout}\n{result.stderr}"
        )
    return result
