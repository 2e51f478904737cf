"""Programs run in processes; one that ends its process is found and named."""

import os

import numpy as np
import pytest

from tests.fuzz import pool
from tests.fuzz.pool import FATAL, PART, Plan, _alone, _parts


@pytest.fixture
def quick(monkeypatch):
    """Processes that import neither JAX nor torch, as their tasks need neither."""
    monkeypatch.setattr(pool, "_start", at_once)
    monkeypatch.setattr(pool, "_text", told)


def at_once(function, optimized):
    return function


def told(seed, numbers, layouts=False):
    return f"programs {[*numbers]} of seed {seed}"


def ends_with_seven(seed, numbers):
    """A task whose process ends where it meets number 7."""
    if 7 in numbers:
        os._exit(1)
    return len(numbers), []


def ends_in_company(seed, numbers):
    """A task whose process ends where it meets 7 and 8 together."""
    if 7 in numbers and 8 in numbers:
        os._exit(1)
    return len(numbers), []


def test_a_program_that_ends_its_process_is_named(quick):
    found = _alone(Plan(seed=3), range(6, 8), ends_with_seven)
    assert found == (2, [(f"seed_3_program_7{FATAL}", "programs [7] of seed 3")])


def takes_too_much(seed, numbers):
    """A task that wants more memory than a process may take."""
    try:
        return np.ones(pool.MEMORY + 1, np.uint8).nbytes, []
    except MemoryError:
        return 0, ["refused"]


def test_a_program_that_takes_all_memory_does_not_get_it():
    assert _alone(Plan(seed=1), range(7, 8), takes_too_much) == (0, ["refused"])


def test_programs_that_end_it_together_are_named(quick):
    found = _alone(Plan(seed=3), range(7, 9), ends_in_company)
    assert found == (2, [(f"seed_3_program_7{FATAL}", "programs [7, 8] of seed 3")])


def test_programs_that_end_it_are_written_out():
    text = pool._text(3, range(7, 9))
    assert "# seed 3, program 7:\n#   it ends the process" in text
    assert "# seed 3, program 8:" in text
    assert "def program(device):" in text


def test_a_number_names_a_program_wherever_a_run_starts():
    parts = _parts(Plan(seed=3, first=PART - 2, programs=PART + 5))
    assert parts == [range(PART - 2, PART), range(PART, 2 * PART), range(2 * PART, 2 * PART + 3)]
    assert _parts(Plan(seed=3, first=0, programs=3)) == [range(3)]


@pytest.mark.parametrize(
    ("for_users", "status", "said"),
    [(True, 1, "0 passed, 1 failed"), (False, 0, "1 passed, 0 failed")],
)
def test_what_differs_only_where_xla_does_not_optimise_is_said_and_not_counted(
    for_users, status, said, monkeypatch, tmp_path, capsys
):
    def found(plan, parts):
        wrong = [(f"seed_{plan.seed}_program_{parts[0].start}{FATAL}", "the program")]
        yield len(parts[0]), wrong if for_users or not plan.optimized else []

    monkeypatch.setattr(pool, "_found", found)
    assert pool.fuzz(Plan(seed=3, first=5, programs=1, out=str(tmp_path))) == status
    out = capsys.readouterr().out
    assert said in out
    assert ("program_5_fatal differs only where XLA does not optimise" in out) != for_users
    assert len(list(tmp_path.iterdir())) == for_users
