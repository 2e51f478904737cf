"""A call passes through few files, so that a reader can follow it: docs/architecture.md, "Hops"."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests import fresh
from tests.checkout import of_this_checkout
from tools import hops

MOST = {
    "x + y": 6,
    "xs.sync()": 23,
    "step(x)": 18,
    "iso.shard(module)": 18,
    "iso.to_jax(t)": 9,
    "iso.save(module)": 15,
    "iso.planner.estimate(f)": 52,
}
"""Call -> the files of ours that it may pass through."""

PAGE = Path(__file__).resolve().parents[1] / "docs" / "architecture.md"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """In a process of its own: what other tests did before would count, too."""
    program = "import json; from tools import hops; print(json.dumps(hops.files()))"
    folder = tmp_path_factory.mktemp("hops")
    done = fresh.run(program, cwd=folder, env={"PYTHONPATH": str(PAGE.parents[1])})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@of_this_checkout
@pytest.mark.parametrize("call", MOST)
def test_a_call_passes_through_few_files(files, call):
    listed = "\n".join(files[call])
    assert 1 < len(files[call]) <= MOST[call], f"{call} passes through\n{listed}"


def test_every_call_has_a_limit_and_stands_on_the_page(files):
    assert files.keys() == MOST.keys()
    rows = re.findall(r"^\| `(.+)` \| \d+ \| \d+ \| \d+ \|$", PAGE.read_text(), re.MULTILINE)
    assert rows == list(MOST)


def test_a_file_is_counted_once_and_a_change_each_time(tmp_path, monkeypatch):
    monkeypatch.setattr(hops, "HOUSES", (f"{tmp_path}/",))
    monkeypatch.setattr(hops, "ROOT", tmp_path)
    there = {}
    for name, text in (("b", "def g(): return 1"), ("a", "def f(g): return g() + g()")):
        exec(compile(text, f"{tmp_path}/{name}.py", "exec"), there)
    found = hops.passed(lambda: there["f"](there["g"]))
    assert found == hops.Passed(["a.py", "b.py"], calls=3, changes=2)
