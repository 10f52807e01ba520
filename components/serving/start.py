"""``python -m components.serving.start serve FOLDER …``: compare a bundle's files with its checksums, then be vLLM.

Whatever fetched the files, every byte is compared before vLLM reads one. ``QDFLASH_SUMS`` is the sha256 of the
bundle's own SHA256SUMS, from where the service is described: without it files that were cut or changed on the way are
found, but not files that someone put into the store together with checksums of their own.
"""

import os
import sys
from pathlib import Path

from components.contract.digest import file_sha256
from components.contract.errors import StageError, UserError, one_line
from components.serving.drain import mark
from components.serving.profiles import SERVING_FILE, SUMS_FILE

VARIABLE = "QDFLASH_SUMS"
ALWAYS = ("--load-format", "safetensors")
OWN_CHANGE = "give the recipe's bundle.serving what it should say, or list your own change there (docs/serving.md)"


def check(folder: Path, sums: str | None) -> int:
    """Compare every file below ``folder`` with its SHA256SUMS, and that with ``sums``; return how many there are.

    Raises :class:`UserError` naming the first file that is missing, altered or not listed.
    """
    listing = folder / SUMS_FILE
    if not listing.is_file():
        raise UserError(f"{listing}: missing; {folder} is not a bundle, or not all of one")
    if sums and file_sha256(listing) != sums:
        raise UserError(
            f"{listing}: not the checksums that {VARIABLE} names; another bundle lies there, or a changed one"
        )
    try:
        pairs = [line.split("  ", 1) for line in listing.read_text(encoding="utf-8").splitlines()]
        wanted = {name: digest for digest, name in pairs}
    except ValueError as error:
        raise UserError(f"{listing}: not lines of a sha256 and a name; fetch the bundle again") from error
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {SUMS_FILE}
    for stray in sorted(found.symmetric_difference(wanted)):
        if stray in found:
            raise UserError(f"{folder / stray}: not in {SUMS_FILE}; take it out of the bundle")
        raise UserError(f"{folder / stray}: missing, but in {SUMS_FILE}; fetch the bundle again")
    for name, digest in wanted.items():
        if file_sha256(folder / name) != digest:
            advice = OWN_CHANGE if name == SERVING_FILE else "fetch the bundle again"
            raise UserError(f"{folder / name}: altered: its sha256 is not that of {SUMS_FILE}; {advice}")
    return len(wanted)


if __name__ == "__main__":
    try:
        count = check(Path(sys.argv[2]), os.environ.get(VARIABLE))
    except StageError as fault:
        print(one_line(fault), file=sys.stderr)
        raise SystemExit(fault.exit_code) from fault
    mark().unlink(missing_ok=True)  # of the container before this one
    against = "of the deployment" if os.environ.get(VARIABLE) else "of its own"
    print(f"{sys.argv[2]}: {count} files agree with the checksums {against}", file=sys.stderr, flush=True)
    os.execvp("vllm", ["vllm", *sys.argv[1:], *ALWAYS])
