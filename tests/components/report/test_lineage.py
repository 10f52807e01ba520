"""The drawing of what was made from what, read back from its SVG."""

import random
import re
from itertools import combinations
from xml.etree import ElementTree

from components.report.collect import TaskRecord
from components.report.lineage import HEIGHT, WIDTH, drawing

SVG = "{http://www.w3.org/2000/svg}"


def task(number, makers):
    told = {"seconds": 1.0, "config": {}, "metrics": {}, "versions": {}}
    inputs = {f"port{at}": [maker.uri, f"s3://b/_files/{at}"] for at, maker in enumerate(makers)}
    return TaskRecord(f"task<{number}>", "stage", f"{number:064x}", f"s3://b/stage/{number}", inputs=inputs, **told)


def reaches(made, name, ancestor):
    return any(maker == ancestor or reaches(made, maker, ancestor) for maker in made[name])


def test_each_artifact_stands_below_its_makers_and_lines_lead_there_once():
    draw = random.Random(0)
    for _ in range(30):
        tasks = []
        for number in range(draw.randrange(1, 24)):
            tasks.append(task(number, draw.choices(tasks, k=draw.randrange(4)) if tasks else []))
        draw.shuffle(tasks)
        svg = ElementTree.fromstring(drawing(tasks))
        wide, high = float(svg.get("width")), float(svg.get("height"))
        boxes = {}
        for link in svg.iter(f"{SVG}a"):
            name, digest = (text.text for text in link.iter(f"{SVG}text"))
            box = link.find(f"{SVG}rect")
            boxes[name] = float(box.get("x")), float(box.get("y"))
            assert link.get("href").startswith(f"#{digest}")
        assert set(boxes) == {one.name for one in tasks}
        assert all(0 <= x <= wide - WIDTH and 0 <= y <= high - HEIGHT for x, y in boxes.values())
        assert all(abs(a[0] - b[0]) >= WIDTH or abs(a[1] - b[1]) >= HEIGHT for a, b in combinations(boxes.values(), 2))
        named = {one.uri: one.name for one in tasks}
        made = {
            one.name: {named[uri] for uris in one.inputs.values() for uri in uris if uri in named} for one in tasks
        }
        wanted = set()
        for name, makers in made.items():
            assert all(boxes[maker][1] + HEIGHT <= boxes[name][1] for maker in makers)
            for maker in makers:
                if not any(reaches(made, other, maker) for other in makers - {maker}):
                    (from_x, from_y), (x, y) = boxes[maker], boxes[name]
                    wanted.add((from_x + WIDTH / 2, from_y + HEIGHT, x + WIDTH / 2, y))
        ends = [tuple(map(float, re.findall(r"[\d.]+", path.get("d")))) for path in svg.iter(f"{SVG}path")]
        assert sorted((*end[:2], *end[-2:]) for end in ends) == sorted(wanted)


def test_a_run_of_nothing_is_drawn_empty():
    assert not list(ElementTree.fromstring(drawing([])))
