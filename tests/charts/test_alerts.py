"""The chart's alerts and dashboard by Prometheus' own promtool."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.charts.conftest import Render
from tests.debian import tool

ON = {"alerts": {"enabled": True}, "dashboard": {"enabled": True}}
VARIABLES = {"$namespace": "serving", "$pod": "pair-.+", "$__rate_interval": "1m"}


def promtool(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    found = tool("prometheus", "promtool")
    return subprocess.run([found, *argv], capture_output=True, text=True, check=False)


def rules(render: Render, folder: Path, changes: dict[str, Any] | None = None) -> Path:
    path = folder / "rules.yaml"
    path.write_text(yaml.safe_dump(render({**ON, **(changes or {})})["PrometheusRule"]["spec"]))
    return path


def dashboard(render: Render) -> dict[str, Any]:
    return json.loads(render(ON)["ConfigMap"]["data"]["qdflash.json"])


@pytest.mark.parametrize("mode", ["kserve", "deployment"])
def test_promtool_reads_every_rule(render: Render, tmp_path: Path, mode: str) -> None:
    done = promtool("check", "rules", rules(render, tmp_path, {"mode": mode}))
    assert done.returncode == 0, done.stderr
    assert "10 rules found" in done.stdout


def test_each_alert_fires_when_it_should_and_not_otherwise(render: Render, tmp_path: Path) -> None:
    path = rules(render, tmp_path)
    scenarios = Path(__file__).with_name("alerts.yaml").read_text()
    (tmp_path / "alerts.yaml").write_text(scenarios)
    done = promtool("test", "rules", tmp_path / "alerts.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    fired = {one["alertname"] for test in yaml.safe_load(scenarios)["tests"] for one in test["alert_rule_test"]
             if one.get("exp_alerts")}  # fmt: skip
    assert fired == {one["alert"] for one in yaml.safe_load(path.read_text())["groups"][0]["rules"]}


def test_the_scenarios_bite(render: Render, tmp_path: Path) -> None:
    """A floor that the alert does not heed, a selector that takes in the neighbours, a few drafts that count."""
    path, tests = rules(render, tmp_path), tmp_path / "alerts.yaml"
    tests.write_text(Path(__file__).with_name("alerts.yaml").read_text())
    wrong = path.read_text()
    for was, now in (("< 3", "< 2.5"), ("[a-z0-9]+-[a-z0-9]{5}", ".+"), ("> 1000", "> 1")):
        assert was in wrong
        wrong = wrong.replace(was, now)
    path.write_text(wrong)
    done = promtool("test", "rules", tests)
    assert done.returncode != 0
    failed = set(re.findall(r"name: (.+),\n", done.stdout + done.stderr))
    assert {" ".join(name.split()[:2]) for name in failed} == {"a healthy", "acceptance falls", "a low"}


def test_without_a_measured_interval_there_is_no_floor_to_alert_by(render: Render) -> None:
    found = render({**ON, "bundle": {"acceptanceFloor": None}})["PrometheusRule"]["spec"]["groups"][0]["rules"]
    assert "QdflashAcceptanceLow" not in {one["alert"] for one in found}


def test_every_query_of_the_dashboard_is_one(render: Render, tmp_path: Path) -> None:
    queries = [target["expr"] for panel in dashboard(render)["panels"] for target in panel["targets"]]
    for name, value in VARIABLES.items():
        queries = [query.replace(name, value) for query in queries]
    assert not any("$" in query for query in queries)
    recorded = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(queries)]
    (tmp_path / "queries.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))
    done = promtool("check", "rules", tmp_path / "queries.yaml")
    assert done.returncode == 0, done.stderr


def test_the_dashboard_s_panels_have_a_place_and_a_name_each(render: Render) -> None:
    made = dashboard(render)
    panels = made["panels"]
    assert len({one["id"] for one in panels}) == len({one["title"] for one in panels}) == len(panels)
    places = [
        (x, y)
        for one in panels
        for x in range(one["gridPos"]["x"], one["gridPos"]["x"] + one["gridPos"]["w"])
        for y in range(one["gridPos"]["y"], one["gridPos"]["y"] + one["gridPos"]["h"])
    ]
    assert len(set(places)) == len(places)
    assert max(x for x, _ in places) < 24
    used = set(re.findall(r"\$(\w+)", json.dumps(made))) - {"__rate_interval", "__all"}
    assert used == {one["name"] for one in made["templating"]["list"]}
