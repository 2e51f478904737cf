"""What test files cost (tools/suite/costs.py), on a suite of two files."""

import json
import subprocess
import sys

from tools.suite import costs

COMPILES = """
import jax

def test_that_compiles():
    assert jax.jit(lambda x: x + 1)(1) == 2

def test_that_does_not():
    pass
"""


def test_seconds_compilations_and_cases(tmp_path):
    """In a worker of pytest-xdist, which hands them on."""
    (tmp_path / "test_a.py").write_text(COMPILES)
    (tmp_path / "test_b.py").write_text("def test_nothing(): pass\n")
    file = tmp_path / "costs.json"
    options = ["-p", "tools.suite.costs", f"--costs={file}", "-n1", "--rootdir=."]
    command = [sys.executable, "-m", "pytest", "-q", *options, "test_a.py", "test_b.py"]
    root = str(costs.__file__).removesuffix("tools/suite/costs.py")
    environment = {"PYTHONPATH": root, "JAX_PLATFORMS": "cpu", "PATH": ""}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, timeout=120)
    found = json.loads(file.read_text())
    assert {name: row["cases"] for name, row in found["files"].items()} == {
        "test_a.py": 2,
        "test_b.py": 1,
    }
    assert found["files"]["test_a.py"]["compilations"] >= 1
    assert found["files"]["test_b.py"]["compilations"] == 0
    assert sorted(found["tests"]) == [
        "test_a.py::test_that_compiles",
        "test_a.py::test_that_does_not",
        "test_b.py::test_nothing",
    ]
    assert costs.table(found["files"]).splitlines()[2].startswith("| test_a.py |")
