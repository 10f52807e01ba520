"""Images made of this machine: a base that is its Python and the few files that needs, and environments on top of it.

No image is fetched from anywhere. Images of roles hold what their stages need of the environments that ``make setup``
made from the locks, because installing PyTorch twice more would take minutes, and so would all the rest of it.
"""

import io
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import threading
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import docker

ROOT = Path(__file__).resolve().parents[2]
VENVS = Path(sys.prefix).parent
PYTHON = Path(sys.base_prefix)
PROGRAMS = ("/bin/sh", "/bin/mkdir", "/bin/cat", "/usr/bin/lscpu")
LIBRARIES = ("libstdc++.so.6", "libgcc_s.so.1", "libgomp.so.1", "libnuma.so.1")
STUBS = (
    "librt.so.1",
    "libpthread.so.0",
    "libdl.so.2",
    "libutil.so.1",
)  # of older C libraries, which wheels still name
ENVIRONMENT = "HOME=/tmp USER=qdflash PYTHONPATH=/opt/qdflash PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1"
Skip = Callable[[Path], bool]


def normal(name: str) -> str:
    """Return a package's name as indexes compare it."""
    return re.sub(r"[-_.]+", "-", name.partition("[")[0]).lower()


def closure(*names: str, packages: Path | None = None) -> dict[str, metadata.Distribution]:
    """Return packages and all that they require, as far as they are installed here or in the folder ``packages``."""
    path = [str(packages)] if packages else sys.path
    installed = {normal(one.metadata["Name"]): one for one in metadata.distributions(path=path)}
    found: dict[str, metadata.Distribution] = {}
    left = list(names)
    while left:
        name = normal(left.pop())
        if name not in found and name in installed:
            found[name] = installed[name]
            wanted = found[name].requires or []
            left += [re.split(r"[^\w.-]", one)[0] for one in wanted if "extra ==" not in one]
    return found


class Tree:
    """A tar of files of this machine, readable by everyone, each at a path of our choice."""

    def __init__(self, out: io.RawIOBase) -> None:
        self._tar = tarfile.open(fileobj=out, mode="w|", bufsize=1 << 20, copybufsize=1 << 20)  # noqa: SIM115
        self._made: set[str] = set()

    def folder(self, path: str, mode: int = 0o755) -> None:
        for parent in [*reversed(Path(path).parents), Path(path)][1:]:
            if str(parent) not in self._made:
                self._made.add(str(parent))
                entry = tarfile.TarInfo(str(parent).lstrip("/"))
                entry.type, entry.mode = tarfile.DIRTYPE, mode if str(parent) == path else 0o755
                self._tar.addfile(entry)

    def file(self, source: Path, target: str, data: bytes | None = None) -> None:
        self.folder(str(Path(target).parent))
        entry = self._tar.gettarinfo(source, target.lstrip("/"))
        entry.uid = entry.gid = 0
        if entry.islnk():  # a hard link of the installer's cache is a file like any other
            entry.type, entry.size = tarfile.REGTYPE, source.stat().st_size
        entry.mode |= 0o444
        if not entry.isreg():
            self._tar.addfile(entry)
        elif data is not None:
            entry.size = len(data)
            self._tar.addfile(entry, io.BytesIO(data))
        else:
            with source.open("rb") as content:
                self._tar.addfile(entry, content)

    def tree(self, source: Path, target: str, skip: Skip = lambda _: False) -> None:
        for folder, names, files in os.walk(source):
            here = Path(folder)
            names[:] = [name for name in names if not skip(here / name)]
            links = [name for name in names if (here / name).is_symlink()]
            for name in (*links, *files):
                if not skip(here / name):
                    self.file(here / name, f"{target}/{(here / name).relative_to(source)}")

    def close(self) -> None:
        self._tar.close()


def add_base(tree: Tree) -> None:
    """Add this Python with pip, and what it needs of the system."""
    library = Path(sysconfig.get_path("stdlib"))
    executable = Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}")
    shared = [Path(path) for path in PYTHON.joinpath("lib").glob("libpython3*.so*")]
    for path in (executable, executable.with_name("python3"), *shared):
        tree.file(path, str(path))
    unused = {library / name for name in ("site-packages", "dist-packages", "test", "idlelib", "ensurepip")}
    tree.tree(library, str(library), lambda path: path in unused or path.suffix == ".a")
    tree.tree(VENVS / "train" / "lib" / library.name / "site-packages" / "pip", f"{library}/pip")
    found = subprocess.run(
        ["ldconfig", "-p"], capture_output=True, text=True, check=True, env={"PATH": "/usr/sbin:/sbin"}
    )
    libraries = {
        line.rsplit("=> ", 1)[1] for line in found.stdout.splitlines() if line.split()[0] in LIBRARIES + STUBS
    }
    binaries = [*map(Path, PROGRAMS), executable, *shared, *(library / "lib-dynload").glob("*.so")]
    told = subprocess.run(["ldd", *binaries, *libraries], capture_output=True, text=True, check=False).stdout
    libraries |= set(re.findall(r"(/\S+) \(0x", told))
    for path in {*libraries, *PROGRAMS} - {str(path) for path in shared}:
        tree.file(Path(path).resolve(), path)
    tree.folder("/tmp", 0o1777)


def add_environment(tree: Tree, role: str, *names: str) -> None:
    """Add packages of a role at /opt/venv and the code at /opt/qdflash, as images/Dockerfile lays them.

    ``names`` and what they require are added, without their own tests and headers.
    """
    venv = VENVS / role
    (packages,) = venv.glob("lib/python3*/site-packages")
    needed = {
        file.parts[0] for one in closure(*names, packages=packages).values() for file in one.files or () if file.parts
    }

    def unused(path: Path) -> bool:
        other = path.parent == packages and path.name not in needed
        return other or path.parent == venv / "bin" or path.name in ("tests", "include")

    tree.tree(venv, "/opt/venv", unused)
    for script in (venv / "bin").iterdir():
        data = None if script.is_symlink() else script.read_bytes().replace(str(venv).encode(), b"/opt/venv")
        tree.file(script, f"/opt/venv/bin/{script.name}", data)
    for package in ("components", "pipelines"):
        tree.tree(ROOT / package, f"/opt/qdflash/{package}", lambda path: path.name == "__pycache__")
    (installed,) = packages.glob("qdflash-*.dist-info")
    tree.tree(installed, f"/opt/qdflash/{installed.name}")
    tree.folder("/state", 0o1777)


def imported(client: docker.DockerClient, name: str, *add: Callable[[Tree], None], changes: list[str]) -> str:
    """Import what ``add`` puts into a tree as the image ``name`` and return its ID."""
    reading, writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "wb", 1 << 20) as out:
            tree = Tree(out)  # type: ignore[arg-type]
            for one in add:
                one(tree)
            tree.close()

    thread = threading.Thread(target=write)
    thread.start()
    with os.fdopen(reading, "rb") as data:
        client.api.import_image_from_data(data, repository=name, tag="latest", changes=changes)
    thread.join()
    return str(client.images.get(name).id)


def base(client: docker.DockerClient) -> str:
    """Make the base."""
    path = f"{PYTHON / 'bin'}:/usr/bin:/bin"
    return imported(client, "qdflash-test-base", add_base, changes=[f"ENV PATH={path}"])


def role(client: docker.DockerClient, name: str, *packages: str) -> str:
    """Make the image of a role from these packages of its environment here."""
    changes = [
        f"ENV PATH=/opt/venv/bin:{PYTHON / 'bin'}:/usr/bin:/bin {ENVIRONMENT}",
        "WORKDIR /tmp",
        'ENTRYPOINT ["python"]',
    ]
    return imported(
        client,
        f"qdflash-test-{name}",
        add_base,
        lambda tree: add_environment(tree, name, *packages),
        changes=[*changes, "USER 65532:65532"],
    )
