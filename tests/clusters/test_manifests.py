"""The JobSet manifests fit the published types, and start what the recipes say.

JobSet's own types come from `kubeflow-trainer-api` (PyPI), models that are generated of its OpenAPI
schema; the jobs in it are held against Kubernetes' schema of batch/v1 by `kubernetes-validate`,
where a field that does not exist is an error.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.multi_process import ranks

FOLDER = ranks.ROOT / "examples" / "clusters"
MANIFESTS = sorted(path.name for path in FOLDER.glob("*.yaml"))
PYTHON = Path(os.environ.get("CLUSTERS_PYTHON", ranks.ROOT / ".venv-clusters/bin/python"))
CHECK = Path(__file__).with_name("check_manifest.py")


def check(text):
    """The faults of a manifest, and its content."""
    assert PYTHON.exists(), f"{PYTHON}: make test-clusters makes it"
    done = subprocess.run(
        [str(PYTHON), str(CHECK)], input=text, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_fits_the_published_types(name):
    assert check((FOLDER / name).read_text())["faults"] == []


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("maxRestarts: 100", "maxRestart: 100"),
        ("maxRestarts: 100", "maxRestarts: often"),
        ("backoffLimit: 0", "backoff: 0"),
        ("restartPolicy: Never", "restartPolicy: [Never]"),
        ("- name: train", "- names: train"),
    ],
)
def test_that_test_can_fail(right, wrong):
    text = (FOLDER / "jobset-gpu.yaml").read_text()
    assert right in text
    assert check(text.replace(right, wrong))["faults"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_is_true_for_the_script(name):
    manifest = check((FOLDER / name).read_text())["manifest"]
    (job,) = manifest["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    command = " ".join(container["command"])
    scripts = [word for word in container["command"] if word.startswith("examples/")]
    assert scripts and all((ranks.ROOT / script).exists() for script in scripts)
    assert "--out" in command and pod["terminationGracePeriodSeconds"] > 20  # --grace
    assert spec["parallelism"] == spec["completions"]
    given = {one["name"]: one.get("value") for one in container.get("env", [])}
    if "HEAD" in given:  # the name that JobSet gives the first pod
        name = manifest["metadata"]["name"]
        assert given["HEAD"] == f"{name}-{job['name']}-0-0.{name}"
        assert manifest["spec"]["network"]["enableDNSHostnames"] is True
        assert given["NODES"] == str(spec["parallelism"])
        assert given["RANKS"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
