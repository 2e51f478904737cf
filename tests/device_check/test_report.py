"""The command's status and its file; figures in the docs are those of the committed results."""

from __future__ import annotations

import json

import pytest

from tools.device_check import __main__ as command
from tools.device_check import report, running
from tools.harness import results as files

ENVIRONMENT = {
    "platform": "gpu",
    "kind": "NVIDIA H100 80GB HBM3",
    "devices": 1,
    "driver": "580.1",
    "versions": {"python": "3.12.3", "isoshard": "0.1.0", "jax": "0.11.2", "triton": None},
}
FIELDS = {"ok", "command", "date", "device", "versions", "seconds", "limit", "sections"}


def step(ms, peak=2**31):
    return {
        "median_ms": ms,
        "losses": [2.0, 1.0],
        "mfu": 0.41,
        "peak_bytes": peak,
        "program_bytes": 2**30,
    }


RESULTS = {
    "environment": ENVIRONMENT,
    "exchange": {"checks": {"a": {"ok": True, "copies": 0, "copied_bytes": 0}}},
    "samples": {"samples": {}},
    "jax": {"models": {"gpt2": step(50.0)}},
    "isoshard": {"models": {"gpt2": step(55.0, None)}, "tokens_per_second": 900.0},
    "torch": {"models": {"gpt2": {"error": {"type": "E", "message": "no\nmore", "frames": []}}}},
    "torch.compile": {},
    "planner": {"depths": {}},
    "operators": {"counts": {}, "failures": [], "entries": 3, "of": 3},
}


@pytest.fixture
def outcomes(monkeypatch):
    """The results of each part, which a test may change."""
    results = dict(RESULTS)

    def run_part(section, part, options, *, call=None):
        status = "failed" if "error" in results[part] else "ok"
        record = {"status": status, "seconds": 1.0, "results": results[part]}
        if "error" in results[part]:
            record |= {"results": {}, "error": results[part]["error"]}
        return record

    monkeypatch.setattr(running, "run_part", run_part)
    return results


def run(tmp_path, *arguments):
    out = tmp_path / "out" / "check.json"
    status = command.main([*arguments, "--out", str(out)])
    return status, json.loads(out.read_text())


def test_a_good_run(outcomes, tmp_path, capsys):
    status, document = run(tmp_path)
    assert status == 0 and document["ok"]
    assert set(document) == FIELDS
    assert document["versions"] == ENVIRONMENT["versions"]
    assert document["device"]["kind"] == ENVIRONMENT["kind"]
    assert list(document["sections"]) == list(report.SECTIONS)
    for section in document["sections"].values():
        assert set(section) == {"status", "seconds", "failures", "summary", "parts"}
    shown = capsys.readouterr().out
    assert "gpt2 1.10" in shown and "900 tokens/s" in shown
    assert "training: torch gpt2 failed, which does not count: E: no" in shown


def test_a_failing_section_ends_with_status_1(outcomes, tmp_path, capsys):
    outcomes["planner"] = {"error": {"type": "Failed", "message": "took too long", "frames": []}}
    status, document = run(tmp_path)
    assert status == 1 and not document["ok"]
    states = {name: section["status"] for name, section in document["sections"].items()}
    assert states.pop("planner") == "failed" and set(states.values()) == {"ok"}
    assert "planner: planner: Failed: took too long" in capsys.readouterr().out


def test_a_section_without_time_ends_with_status_1(outcomes, tmp_path):
    status, document = run(tmp_path, "--limit", "0", "--only", "exchange")
    assert status == 1
    assert document["sections"]["exchange"]["status"] == "not run"


def test_only_some_sections(outcomes, tmp_path):
    _, document = run(tmp_path, "--only", "operators,exchange")
    assert list(document["sections"]) == ["exchange", "operators"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "exchange,speed"], "unknown sections ['speed']"),
        (["--device", "tpu"], "invalid choice"),
    ],
)
def test_wrong_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_another_device_than_jax_has(outcomes):
    outcomes["environment"] = {**ENVIRONMENT, "platform": "cpu", "kind": "cpu"}
    with pytest.raises(SystemExit, match=r"--device gpu: JAX's device is cpu"):
        command.main(["--device", "gpu"])


def test_jax_that_does_not_start(outcomes):
    outcomes["environment"] = {"error": {"type": "ImportError", "message": "no jax", "frames": []}}
    with pytest.raises(SystemExit, match="do not start: no jax"):
        command.main([])


def test_a_folder_without_wheels(tmp_path):
    with pytest.raises(SystemExit, match="the folder has no wheel"):
        command.main(["--wheels", str(tmp_path)])


@pytest.mark.parametrize("page", report.PAGES)
def test_pages_show_the_committed_results(page):
    text = (files.ROOT / page).read_text()
    expected = report.block(page, report.committed())
    assert f"{report.BEGIN}\n{expected}\n{report.END}\n" in text, (
        f"python -m tools.device_check --write-docs {report.COMMITTED} writes it"
    )


@pytest.fixture
def repository(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "ROOT", tmp_path)
    monkeypatch.setattr(report, "COMMITTED", tmp_path / "device_check.json")
    (tmp_path / "docs").mkdir()
    for page in report.PAGES:
        (tmp_path / page).write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    return tmp_path


def test_figures_of_a_gpu_go_into_the_docs(outcomes, repository):
    _, document = run(repository)
    assert command.main(["--write-docs", str(repository / "out" / "check.json")]) == 0
    assert report.committed() == document
    text = (repository / "docs/benchmarks.md").read_text()
    assert text.startswith(f"before\n{report.BEGIN}\nOn one NVIDIA H100 80GB HBM3, ")
    assert text.endswith(f"\n{report.END}\nafter\n") and "old" not in text
    assert "| GPT-2 124M, hand-written JAX | 50.00 ms | 1.00 | 41% | 2.0 GiB |" in text
    assert "| GPT-2 124M, isoshard, `xs.compile` | 55.00 ms | 1.10 | 41% | 1.0 GiB |" in text
    readme = (repository / "README.md").read_text()
    assert "GPT-2 124M 1.10" in readme
    assert all(len(line) <= 160 for line in readme.splitlines())


def test_figures_of_a_cpu_do_not(outcomes, repository, capsys):
    outcomes["environment"] = {**ENVIRONMENT, "platform": "cpu", "kind": "cpu"}
    run(repository)
    assert command.main(["--write-docs", str(repository / "out" / "check.json")]) == 1
    assert "has results of a CPU" in capsys.readouterr().err
    assert report.committed() is None


def test_a_page_without_markers_is_named(repository):
    page = repository / "README.md"
    page.write_text("text\n")
    with pytest.raises(LookupError, match=r"README\.md: expected one line <!-- figures of a GPU"):
        report.replace_block(page, "new")
