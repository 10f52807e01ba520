"""What a role's image holds beside its base: ``python tests/images/sizes.py train`` lists its lock's packages by size.

Sizes are those of the files that the packages installed into this machine's environment of the role.
"""

import re
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LOCKS = {"core": "core", "train": "train-cpu", "vllm": "vllm-cpu"}


def normal(name: str) -> str:
    """Return a package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def sizes(role: str) -> dict[str, int]:
    """Return the bytes of each package of the role's CPU lock, the largest first."""
    lock = (ROOT / "locks" / f"{LOCKS[role]}.txt").read_text()
    pinned = {normal(name) for name in re.findall(r"^([\w.-]+)==", lock, re.MULTILINE)}
    (packages,) = (ROOT / ".venv" / role / "lib").glob("python3*/site-packages")
    found = {}
    for one in metadata.distributions(path=[str(packages)]):
        if (name := normal(one.metadata["Name"])) in pinned:
            found[name] = sum(Path(str(file.locate())).stat().st_size for file in one.files or () if _is_there(file))
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _is_there(file: metadata.PackagePath) -> bool:
    return Path(str(file.locate())).is_file()


if __name__ == "__main__":
    listed = sizes(sys.argv[1])
    print(f"{sum(listed.values()) / 1e6:6.0f} MB in {len(listed)} packages")
    for package, size in list(listed.items())[:10]:
        print(f"{size / 1e6:6.0f} MB {package}")
