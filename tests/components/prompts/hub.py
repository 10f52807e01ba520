"""A hub on loopback: serves data sets' files, each at one revision, to holders of one token only.

It answers what the Hugging Face client asks for when it streams a data set, so the real client, its retries, range
requests and errors run against real HTTP.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from threading import Event
from urllib.parse import unquote, urlsplit

from tests.loopback import serving

TOKEN = "hf_accepted"


@contextmanager
def serve(*repositories: tuple[str, str, Path], pause: Event | None = None) -> Iterator[tuple[str, list[str]]]:
    """Yield the hub's address and the requests that it has begun to answer, as ``METHOD path``.

    A repository is its name, its revision and the folder of its files. Until ``pause`` is set, parquet files are sent
    to their middle.
    """
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            asked.append(f"{self.command} {path}")
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            found = next((one for one in repositories if f"datasets/{one[0]}/" in path + "/"), None)
            if found is None:
                return self.fail(404, "RepoNotFound")
            repository, revision, folder = found
            files = {one.relative_to(folder).as_posix(): one for one in folder.rglob("*") if one.is_file()}
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self.fail(403 if "Authorization" in self.headers else 401, "GatedRepo")
            if revision not in path:
                return self.fail(404, "RevisionNotFound")
            if "/tree/" in path:
                return self.reply(self.tree(files, path.split(revision)[1].strip("/")))
            if "/paths-info/" in path:
                return self.reply([entry(files, name) for name in paths_of(body) if name in files])
            if path.startswith("/api/"):
                siblings = [{"rfilename": name} for name in sorted(files)]
                return self.reply({"id": repository, "sha": revision, "siblings": siblings, "private": False})
            name = path.split(f"{revision}/")[1]
            return self.send(files[name], revision) if name in files else self.fail(404, "EntryNotFound")

        do_HEAD = do_POST = do_GET

        def tree(self, files: dict[str, Path], folder_name: str) -> list[dict]:
            inside = [name for name in sorted(files) if name.startswith(f"{folder_name}/" if folder_name else "")]
            if "recursive=true" in self.path.lower():
                return [entry(files, name) for name in inside]
            rest = {name: name.removeprefix(f"{folder_name}/") for name in inside}
            folders = sorted({name.split("/")[0] for name in rest.values() if "/" in name})
            return [{"type": "directory", "path": name, "oid": f"{len(name):040x}"} for name in folders] + [
                entry(files, name) for name, short in rest.items() if "/" not in short
            ]

        def reply(self, document: object) -> None:
            self.answer(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

        def fail(self, status: int, code: str) -> None:
            self.answer(status, b"", {"X-Error-Code": code, "X-Error-Message": code})

        def send(self, path: Path, revision: str) -> None:
            data = path.read_bytes()
            about = {"ETag": f'"{path.name}"', "X-Repo-Commit": revision, "Accept-Ranges": "bytes"}
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            if not wanted:
                return self.answer(200, data, about)
            first, last = int(wanted[1]), min(int(wanted[2] or len(data) - 1), len(data) - 1)
            about["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            return self.answer(206, data[first : last + 1], about)

        def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "HEAD":
                return
            middle = len(body) // 2 if pause and self.path.endswith(".parquet") else len(body)
            with suppress(ConnectionError):
                self.wfile.write(body[:middle])
                if pause and middle < len(body):
                    pause.wait()
                    self.wfile.write(body[middle:])

        def log_message(self, *_: object) -> None:
            pass

    with serving(Handler) as (_, url):
        yield url, asked


def entry(files: dict[str, Path], name: str) -> dict:
    """Return a file as the hub lists it."""
    return {"type": "file", "path": name, "size": files[name].stat().st_size, "oid": f"{sum(name.encode()):040x}"}


def paths_of(body: bytes) -> list[str]:
    """Return the paths that a paths-info request asks about: JSON or a form."""
    try:
        return json.loads(body)["paths"]
    except ValueError:
        return re.findall(r"paths=([^&]*)", unquote(body.decode()))
