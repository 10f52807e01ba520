"""Images made of this machine, because none is fetched from anywhere: a base that is its Python and the few files that
needs, and a builder, which is the base with pip.
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
Skip = Callable[[Path], bool]


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

    def file(self, source: Path, target: str) -> None:
        self.folder(str(Path(target).parent))
        entry = self._tar.gettarinfo(source, target.lstrip("/"))
        entry.uid = entry.gid = 0
        if entry.islnk():  # a hard link of the installer's cache is a file like any other
            entry.type, entry.size = tarfile.REGTYPE, source.stat().st_size
        entry.mode |= 0o444
        if not entry.isreg():
            self._tar.addfile(entry)
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
    """Add this Python, and what it needs of the system."""
    library = Path(sysconfig.get_path("stdlib"))
    executable = Path(sys.base_prefix, "bin", f"python3.{sys.version_info.minor}")
    shared = [Path(path) for path in PYTHON.joinpath("lib").glob("libpython3*.so*")]
    for path in (executable, executable.with_name("python3"), *shared):
        tree.file(path, str(path))
    unused = {library / name for name in ("site-packages", "dist-packages", "test", "idlelib", "ensurepip")}
    tree.tree(library, str(library), lambda path: path in unused or path.suffix == ".a")
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


def base(client: docker.DockerClient) -> str:
    """Make the base and return its name."""
    reading, writing = os.pipe()

    def write() -> None:
        with os.fdopen(writing, "wb", 1 << 20) as out:
            tree = Tree(out)  # type: ignore[arg-type]
            add_base(tree)
            tree.close()

    thread = threading.Thread(target=write)
    thread.start()
    path = f"ENV PATH={PYTHON / 'bin'}:/usr/bin:/bin"
    with os.fdopen(reading, "rb") as data:
        client.api.import_image_from_data(data, repository="qdflash-test-base", tag="latest", changes=[path])
    thread.join()
    return "qdflash-test-base"


def builder(client: docker.DockerClient) -> str:
    """Make the builder on the base and return its name."""
    library = Path(sysconfig.get_path("stdlib"))
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as context:
        context.add(VENVS / "train" / "lib" / library.name / "site-packages" / "pip", "pip")
        recipe = f"FROM qdflash-test-base\nCOPY pip {library}/pip\n".encode()
        entry = tarfile.TarInfo("Dockerfile")
        entry.size = len(recipe)
        context.addfile(entry, io.BytesIO(recipe))
    data.seek(0)
    client.images.build(fileobj=data, custom_context=True, tag="qdflash-test-builder", rm=True)
    return "qdflash-test-builder"
