"""What runs in a worker process: the cases of test files, one at a time."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import traceback
import unittest
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .differences import need_of
from .outcomes import Outcome, asks_for_ranks

LOST_GRADIENT = "failed to run BW"
"""torch's test of operators prints this where backward raises, and passes."""
NONE_ASKED = ("does not require grad", "grad can be implicitly created only")
"""Unless torch's own operator would say the same."""


def start(
    devices: int, strict: bool = False, samples: int | None = None, choices: int | None = None
) -> Callable[[str, str | None], Any]:
    """Set a process up.

    Args:
        devices: see `settings.Settings`, as `strict` and `choices`.
        strict: whether placements end a case.
        samples: of an operator at most so many are tried; all if not given.
        choices: of the placements of its arguments likewise.

    Returns:
        A function of a file and a case, which runs it; without a case, the names of the file's.
    """
    os.environ["PYTORCH_PRINT_REPRO_ON_FAILURE"] = "0"
    import tests.conftest  # noqa: F401  (its devices and options of the compiler)

    from . import rank_zero
    from .settings import Settings

    rank_zero.install()
    warnings.simplefilter("ignore")
    Settings.devices, Settings.strict, Settings.choices = devices, strict, choices
    if samples is not None:
        _take_few(samples)

    def run(file: str, case: str | None) -> Any:
        cases = _cases(Path(file))
        if case is None:
            return list(cases)
        if (why := need_of(Path(file).stem, case)) is not None:
            return Outcome("ranks", [("needs", why)])
        return _run(*cases[case])

    return run


@functools.lru_cache(maxsize=1)
def _cases(path: Path) -> dict[str, tuple[type, str]]:
    """The cases of a file: class and method by `Class::method`."""
    from .common import OnePiece
    from .renaming import load

    unittest.expectedFailure = lambda test: test  # what torch cannot do may work here
    found: dict[str, tuple[type, str]] = {}
    for name, cls in vars(load(path)).items():
        if isinstance(cls, type) and issubclass(cls, unittest.TestCase):
            if cls.__module__.startswith(("torch.", "unittest", "isoshard", __package__)):
                continue
            mixed = type(name, (OnePiece, cls), {})
            for method in unittest.defaultTestLoader.getTestCaseNames(mixed):
                found[f"{name}::{method}"] = mixed, method
    return found


def _run(cls: Any, method: str) -> Outcome:
    import torch

    from . import common
    from .names import NotHereError

    common.NOTES.clear()
    said = io.StringIO()
    outcome, error = "pass", None
    torch.manual_seed(0)
    try:
        with contextlib.redirect_stdout(said):
            cls.setUpClass()
            case = cls(method)
            case.setUp()
            try:
                getattr(case, method)()
            finally:
                case.tearDown()
                case.doCleanups()
                cls.tearDownClass()
    except unittest.SkipTest as skipped:
        return Outcome("skipped", [("skipped", str(skipped))])
    except NotHereError as absent:
        return Outcome("ranks", [("private", str(absent))])
    except Exception as raised:
        error = raised
        outcome = "ranks" if asks_for_ranks(raised) else "differ"
    notes = [note for note in common.NOTES if note[0] in ("placements", "words", "decided")]
    lost = [line for line in said.getvalue().splitlines() if _is_lost_gradient(line)]
    if error is not None:
        notes.append(("raised", _described(error)))
    elif lost:
        outcome = "differ"
        notes += [("gradient", line) for line in lost]
    elif notes:
        outcome = "values"
    return Outcome(outcome, notes)


def _is_lost_gradient(line: str) -> bool:
    return LOST_GRADIENT in line and not any(words in line for words in NONE_ASKED)


def _described(error: BaseException) -> str:
    """An error, where in the test it came, and what it came from."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "test" in Path(frame.filename).stem]
    line = f" (line {ours[-1].lineno})" if ours else ""
    words = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}{line}: {words}"


def _take_few(count: int) -> None:
    """Let torch's operators give few samples."""
    from torch.testing._internal.opinfo.core import OpInfo

    whole = OpInfo.sample_inputs

    def few(self: Any, *args: Any, **named: Any) -> Any:
        return itertools.islice(whole(self, *args, **named), count)

    OpInfo.sample_inputs = few
