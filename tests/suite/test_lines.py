"""Which lines a test executes, and which tests are spare (tools/suite/lines.py)."""

import json
import subprocess
import sys

import pytest

from tools.suite import lines

TESTS = """
import pytest

@pytest.mark.parametrize("n", [1, 2])
def test_that_executes_nothing_of_ours(n):
    pass

def test_that_makes_a_mesh():
    import isoshard as iso
    iso.make_mesh((1,), ("x",))
"""


def test_a_test_whose_lines_others_execute_is_spare():
    tests = {
        "long": {"seconds": 9.0, "lines": {"a.py": [1, 2]}},
        "short": {"seconds": 1.0, "lines": {"a.py": [1, 2], "b.py": [7]}},
        "shortest": {"seconds": 0.1, "lines": {"a.py": [1]}},
        "alone": {"seconds": 5.0, "lines": {"c.py": [3]}},
    }
    assert lines.spare(tests) == ["long", "shortest"]


@pytest.mark.skipif(sys.version_info < (3, 12), reason="needs sys.monitoring")
@pytest.mark.parametrize("workers", [0, 1])
def test_the_lines_of_each_test(tmp_path, workers):
    (tmp_path / "test_a.py").write_text(TESTS)
    file = tmp_path / "lines.json"
    options = ["-p", "tools.suite.lines", f"--lines={file}", f"-n{workers}", "--rootdir=."]
    command = [sys.executable, "-m", "pytest", "-q", *options, "test_a.py"]
    root = str(lines.__file__).removesuffix("tools/suite/lines.py")
    environment = {"PYTHONPATH": ":".join([root, *filter(None, sys.path)]), "PATH": ""}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, check=False, timeout=120, capture_output=True
    )
    assert done.returncode == 0, done.stdout
    found = json.loads(file.read_text())
    assert found["test_a.py::test_that_executes_nothing_of_ours"]["lines"] == {}
    assert any("core/" in name for name in found["test_a.py::test_that_makes_a_mesh"]["lines"])
