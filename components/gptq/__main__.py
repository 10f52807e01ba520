"""Command line of this stage."""

from components.contract.cli import main

raise SystemExit(main("gptq"))
