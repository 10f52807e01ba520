"""The console that commands print to."""

import os
import sys

from rich.console import Console

WIDTH = 160


def console() -> Console:
    """Return a console; without a terminal, tables are not squeezed into the 80 columns that rich assumes."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else WIDTH)
