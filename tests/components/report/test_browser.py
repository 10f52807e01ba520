"""The page in a real Chromium: it draws, it needs no network, nothing sticks out on a phone; one run and two."""

import json
import shutil
import subprocess

import pytest

from components.checkpoint.step_bytes import Model
from components.measure.stage import REGIMES
from components.report.collect import TaskRecord
from components.report.page import differences, render, render_runs

pytestmark = pytest.mark.slow

# Runs beside the page, in another frame: the page itself has no script.
PROBE = """<!doctype html><iframe id="page" width="%d" height="900" src="%s"></iframe><script>
document.getElementById("page").onload = event => {
  const page = event.target.contentDocument, ids = new Set([...page.querySelectorAll("[id]")].map(one => one.id));
  const wide = [...page.querySelectorAll("body *")].filter(one => !one.closest(".scroll") &&
    one.getBoundingClientRect().right > page.documentElement.clientWidth + 1);
  const drawn = [...page.querySelectorAll("figure svg")].filter(one => one.getBoundingClientRect().height > 50);
  const found = {
    title: page.title, figures: drawn.length, wide: wide.map(one => one.outerHTML.slice(0, 80)),
    dead: [...page.querySelectorAll("a")].map(one => one.getAttribute("href")).filter(one => !ids.has(one.slice(1))),
    paper: getComputedStyle(page.body).backgroundColor, ink: getComputedStyle(page.body).color,
    loaded: page.defaultView.performance.getEntriesByType("resource").length,
  };
  document.body.textContent = "FOUND" + JSON.stringify(found) + "DNUOF";
};
</script>"""


def took(seconds):
    """Three timed requests of one regime and a failed one, two regimes."""
    samples = [{"seconds": seconds}] * 3 + [{"failed": "status 500"}]
    return {"short": samples, "long": [{"seconds": seconds / 2}] * 3}


def a_run(scale, damping):
    """A made-up run: its tasks by name."""
    interval = {"low": 1.2 * scale, "high": 1.6 * scale, "n": 24}
    latency = {
        name: {"median_ms": ms * scale, "low": 0.9 * ms * scale, "high": 1.1 * ms * scale, "n": 50}
        for name, ms in (("short", 500.0), ("medium", 980.0), ("long", 1050.0))
    }
    measured = {"latency": latency, "machine": {"device": "gpu", "name": "A10G"}, "quality": {}}
    measured["quality"]["mmlu_pro"] = {"score": 0.62, "low": 0.6, "high": 0.64, "n": 100}
    asked = {"latency": {name: regime.model_dump() for name, regime in REGIMES.items()}}
    drafted = {"value": 1.4 * scale, **interval, "per_position": [0.3, 0.1, 0.05]}
    pair = {**measured, "acceptance_length": drafted, "parity": {"compared": 8, "equal": 8, "ties": 0, "broken": 0}}
    answer = {"id": "p1", "prompt": "Say <b>hi</b>", "text": "hi " * 60}
    answered = {"samples": [answer]}
    rule = {"name": "acceptance", "metric": "measure_pair.acceptance_length.low", "value": 1.2, "demand": "above 1"}
    gate = {"passed": True, "failed": [], "rules": [{**rule, "status": "pass"}]}
    curve = [{"step": step, "kl": 0.5 / (step + 1), "loss": 0.6 / (step + 1)} for step in range(5)]
    target = Model(2_000_000_000, 1_000_000_000, 0, 4_000_000_000, 600_000_000, 32768, 100_000_000, 8192)
    drafter = Model(300_000_000, 0, 0, 500_000_000, 0, 20480, 0, 8192, block_size=16)
    parts = [
        ("qad", "qad", {"kl_before": 0.5, "kl_after": 0.1, "codes_changed": 0.01}, {}, {"curve": curve}),
        ("gptq", "gptq", {}, {"damping": damping}, {}),
        ("measure_baseline", "measure", measured, asked, {**answered, "timed": took(4), "served": (target, None)}),
        ("measure_target", "measure", measured, asked, {**answered, "timed": took(2), "served": (target, None)}),
        ("measure_pair", "measure", pair, asked, {**answered, "timed": took(scale), "served": (target, drafter)}),
        ("gate", "gate", gate, {}, {}),
    ]
    found = {}
    for number, (name, stage, metrics, config, drawn) in enumerate(parts):
        digest = f"{int(100 * damping)}{number}".rjust(64, "0")
        uri, made = f"s3://bucket/{stage}/{digest}", {"python": "3.11.7", "torch": "2.13.0"}
        before = {"qad": [found["qad"].uri]} if "qad" in found else {}
        told = {"seconds": 12.5, "config": config, "metrics": metrics, "versions": made, "inputs": before}
        found[name] = TaskRecord(name=name, stage=stage, digest=digest, uri=uri, **told, **drawn)
    return found


def look(page, width, *flags, folder):
    """Open a page in Chromium in a frame so wide; return what the probe finds and what the console says."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no browser here (Debian: apt-get install chromium)")
    (folder / "probe.html").write_text(PROBE % (width, page.name))
    argv = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", *flags]
    argv += [f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=5000"]
    done = subprocess.run(
        [*argv, "--dump-dom", (folder / "probe.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    found = done.stdout.partition("FOUND")[2].partition("DNUOF")[0].replace("&lt;", "<").replace("&gt;", ">")
    return json.loads(found), [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize("runs", [1, 2])
def test_the_page_in_a_browser(runs, tmp_path):
    page = tmp_path / "index.html"
    if runs == 1:
        html, _ = render("a run", a_run(1, 0.01), 3)
    else:
        html, _ = render_runs("smol and other", {"smol": a_run(1, 0.01), "other": a_run(1.5, 0.05)}, 3)
    page.write_text(html)
    drawn = 5 if runs == 1 else 7  # each run has two curves of its own
    backgrounds = set()
    for width, flags in ((1200, []), (390, ["--blink-settings=preferredColorScheme=0"])):
        found, console = look(page, width, *flags, folder=tmp_path)
        assert console == []
        assert (found["title"], found["figures"]) == ("a run" if runs == 1 else "smol and other", drawn)
        assert (found["wide"], found["dead"], found["loaded"]) == ([], [], 0)
        assert found["paper"] != found["ink"]
        backgrounds.add(found["paper"])
    assert len(backgrounds) == 2, "light and dark look the same"


def test_two_runs_show_what_was_asked_for_differently_and_both_columns():
    runs = {"smol": a_run(1, 0.01), "other": a_run(1.5, 0.05)}
    assert differences(runs) == [{"field": "gptq.damping", "values": [0.01, 0.05]}]
    html, sections = render_runs("both", runs, 3)
    assert "differences" in sections
    for text in ("<th>smol/target + drafter</th>", "<th>other/target + drafter</th>", "500 [450, 550], n = 50",
                 "750 [675, 825], n = 50", "other: Gate passed"):  # fmt: skip
        assert text in html
    told = ("–", "–", "2 [2, 2]", "2 [2, 2]", "4 [4, 4]", "2.667 [2.667, 2.667]")
    cells = "".join(f"<td>{cell}</td>" for cell in told)
    for row in ("than the baseline: short", "than the baseline: long", ": mean of the regimes"):
        assert f"<th>times faster{' ' if row[0] != ':' else ''}{row}</th>{cells}" in html
