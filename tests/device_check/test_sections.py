"""What counts as a failure in the results of each section, and the main numbers."""

from __future__ import annotations

import pytest

from tools.device_check.sections import SECTIONS

OK = {"ok": True, "copies": 0, "copied_bytes": 0}
ERROR = {"type": "MismatchError", "message": "address: got 1, expected 2", "frames": []}


def judged(name, **results):
    section = SECTIONS[name]
    parts = {part: results.get(part, {}) for part in section.parts}
    return section.failures(parts), section.summary(parts)


def model(ms=1.0, losses=(2.0, 1.0)):
    return {"median_ms": ms, "losses": list(losses)}


def test_exchange():
    checks = {
        "good": OK,
        "copied": {"ok": False, "copies": 1, "copied_bytes": 64},
        "wrong": {"ok": False, "copies": 0, "copied_bytes": 0, "error": ERROR},
    }
    failures, summary = judged("exchange", exchange={"checks": checks})
    assert failures == [
        "copied: 64 bytes were copied",
        "wrong: MismatchError: address: got 1, expected 2",
    ]
    assert summary == "1 of 3 pass, 64 bytes copied"


def test_samples():
    samples = {
        "good": {"ok": True, "platform": "gpu", "output": "1\n"},
        "raises": {"ok": False, "platform": "", "output": "Traceback ..\nValueError: no\n"},
    }
    failures, summary = judged("samples", samples={"samples": samples})
    assert failures == ["raises, on no platform: ValueError: no"]
    assert summary == "1 of 2 pass"


@pytest.mark.parametrize(
    ("losses", "count"), [((2.0, 1.02), 0), ((2.0, 1.1), 1), ((2.0, float("nan")), 1)]
)
def test_training_compares_losses(losses, count):
    ours = {"models": {"mlp": model(3.0, losses)}}
    failures, summary = judged("training", jax={"models": {"mlp": model(2.0)}}, isoshard=ours)
    assert len(failures) == count
    assert all("mlp: the losses [2.0, " in failure for failure in failures)
    assert summary == "step time over hand-written JAX: mlp 1.50"


def test_training_names_models_that_fail():
    failures, _ = judged("training", jax={"models": {"vit": {"error": ERROR}}})
    assert failures == ["vit, jax: MismatchError: address: got 1, expected 2"]
    peer = {"models": {"vit": {"error": ERROR}}}
    assert judged("training", torch=peer) == ([], "step time over hand-written JAX: unknown")


@pytest.mark.parametrize(
    ("logits", "count"),
    [([1.0, -3.9], 0), ([1.0, -3.5], 1), ([1.0, float("nan")], 1)],
)
def test_decode_compares_logits(logits, count):
    theirs = {"logits": [1.0, -4.0], "tokens_per_second": 1000.0}
    failures, summary = judged("decode", isoshard={"logits": logits}, torch=theirs)
    assert len(failures) == count
    assert summary == "torch 1,000 tokens/s"


def test_planner():
    estimates = {"mlp": {"time_ratio": 0.5, "memory_ratio": 1.0}, "vit": {"error": ERROR}}
    depths = {"trace": estimates, "compile": {"mlp": {"skipped": "no compiler"}}}
    failures, summary = judged("planner", planner={"depths": depths})
    assert failures == ["vit, depth 'trace': MismatchError: address: got 1, expected 2"]
    assert summary == "predicted over measured: trace, time: mlp 0.50; trace, memory: mlp 1.00"


def test_operators():
    failure = {"entry": "add", "column": "int64", "reason": "wrong: 1 differs", "error": 0.5}
    counts = {"int64": {"passed": 1, "compared": 2, "samples": 4}}
    result = {"counts": counts, "failures": [failure], "entries": 2, "of": 3}
    failures, summary = judged("operators", operators=result)
    assert failures == [
        "add, int64: wrong: 1 differs (largest error 5.0e-01)",
        "only 2 of 3 entries, for lack of time",
    ]
    assert summary == "2 entries; passed: int64 1/2"
    assert judged("operators", operators={**result, "failures": [], "entries": 3})[0] == []
