"""Tools that no Python package has: the machine's own, else from Debian, unpacked beside the environments."""

import shutil
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parents[1] / ".venv" / "debian"


def tool(package: str, name: str) -> str:
    """Return the path of one of a package's programs. A machine that has no way to it fails the test."""
    if found := shutil.which(name):
        return found
    unpacked = FOLDER / package / "usr" / "bin" / name
    if not unpacked.exists():
        assert shutil.which("apt-get"), f"{name} is not here and this is no Debian: install {package}"
        FOLDER.mkdir(parents=True, exist_ok=True)
        download = ["apt-get", "download", "-qq", package]
        if subprocess.run(download, cwd=FOLDER, check=False).returncode:
            subprocess.run(["apt-get", "update", "-qq"], check=True)
            subprocess.run(download, cwd=FOLDER, check=True)
        newest = max(FOLDER.glob(f"{package}_*.deb"), key=lambda path: path.stat().st_mtime)
        subprocess.run(["dpkg", "-x", newest, FOLDER / package], check=True)
        newest.unlink()
    return str(unpacked)
