"""A call in a new process gives a result, or says what became of the process."""

import sys

import pytest

from tools.harness import calls


def test_a_result_comes_back_whatever_is_printed():
    assert calls.call("tests.harness.test_calls:noisy", [1, 2], limit=60) == {"sum": 3}


def noisy(numbers):
    print("{not the result}")
    return {"sum": sum(numbers)}


@pytest.mark.parametrize(
    ("function", "argument", "reason"),
    [
        ("os:_exit", 3, "ended with status 3: no output"),
        ("sys:exit", "no such device", "ended with status 1: no such device"),
        ("builtins:int", "one\ntwo", "ValueError: invalid literal for int() with base 10:"),
        ("time:sleep", 60, "took more than 0 s"),
    ],
)
def test_a_call_without_a_result_says_why(function, argument, reason):
    with pytest.raises(calls.Failed) as failed:
        calls.call(function, argument, limit=0.2 if argument == 60 else 60)
    assert str(failed.value).startswith(reason)


def test_ranks_have_a_world(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    found = calls.together("tests.harness.test_calls:world", variables=calls.ranks(2), limit=60)
    assert [rank for rank, *_ in found] == ["0", "1"]
    assert found[0][1:] == found[1][1:] and found[0][2:] == ["2", None]


def world():
    import os

    return [os.getenv(n) for n in ("RANK", "MASTER_PORT", "WORLD_SIZE", "XLA_FLAGS")]


def test_the_other_python_needs_nothing_of_ours():
    assert calls.call("sys:getrecursionlimit", python=sys.executable, limit=60) > 100
