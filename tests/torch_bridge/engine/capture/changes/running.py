"""Run a case in a mode beside its reference, and compare after every call."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import isoshard.torch_bridge as xs
from tests.torch_bridge.engine.capture.changes.worlds import Case, World

AFTER = 2
"""Calls after each edit."""


class SilentChangeError(AssertionError):
    """A mode gave another result than its reference, and no error."""


@dataclasses.dataclass
class Outcome:
    """One call: what it returned, what was there afterwards, or what it raised."""

    result: Any = None
    state: Any = None
    error: Exception | None = None


def check(case: Case, mode: str) -> None:
    """Fail if the mode differs silently from the reference, or raises what names nothing.

    What dynamo itself freezes must be as it is on the CPU with dynamo's "eager" backend. Otherwise
    the reference has to show the change, unless the case says why it does not.
    """
    device, inner = ("cpu", mode) if case.against != "lazy" else ("jax", _uncompiled(mode))
    backend = "eager" if mode == "dynamo" and case.frozen else None
    wanted = list(_outcomes(case, device, inner, backend))
    found = list(_outcomes(case, "jax", mode, "isoshard"))
    if case.against == "pattern":
        wanted, found = _pattern(wanted), _pattern(found)
    if backend == "isoshard":
        assert _shows(wanted) is not bool(case.unseen)
    for number, (want, got) in enumerate(zip(wanted, found, strict=True)):
        if want.error is not None:
            assert type(got.error) is type(want.error), f"call {number} must raise {want.error!r}"
            return
        if got.error is not None:
            text = f"{type(got.error).__name__}: {got.error}"
            named = any(_says(text, name) for name in case.names)
            assert named, f"call {number} raised what names none of {case.names}: {text}"
            return
        _compare(got.result, want.result, case.rtol, f"call {number}: the result")
        _compare(got.state, want.state, case.rtol, f"after call {number}: the state")


def _shows(outcomes: list[Outcome]) -> bool:
    """Whether a call differs from the first, or raises."""
    if any(one.error is not None for one in outcomes):
        return True
    leaves = [pytree.tree_leaves((one.result, one.state)) for one in outcomes]
    return len({repr(one) for one in leaves}) > 1


def _says(text: str, name: str) -> bool:
    """Whether a name stands in a text as a word."""
    return re.search(rf"(?<![A-Za-z]){re.escape(name)}s?(?![A-Za-z])", text) is not None


def _uncompiled(mode: str) -> str:
    return "lazy" if mode in ("compile", "dynamo") else mode


def _outcomes(case: Case, device: str, mode: str, backend: str | None) -> Iterator[Outcome]:
    """Calls, and after each edit some more; they end with the first error.

    Args:
        case: what is run.
        device: where.
        mode: how its step is made.
        backend: of `torch.compile`; None compiles nothing, whatever the mode.
    """
    with _restored(), contextlib.ExitStack() as stack:
        try:
            world = case.make(device, mode)
            if backend is not None and mode == "dynamo":
                world.dynamo(backend)
            step = xs.compile(world.step) if backend and mode == "compile" else world.step
        except Exception as error:
            yield Outcome(error=error)
            return
        stack.callback(world.close)
        stack.callback(_put_back, world)
        x = torch.sin(torch.arange(16.0).square() * 0.7).reshape(4, 4).to(device)
        for number, edit in enumerate((tuple, *world.edits[: case.called])):
            for _ in range(AFTER if number else case.before):
                try:
                    if edit is not None:
                        edit()
                    edit = None
                    result = step(x, *world.extra())
                    outcome = Outcome(_read(result, case), _read(world.state(), case))
                except Exception as error:
                    yield Outcome(error=error)
                    return
                yield outcome


def _read(tree: Any, case: Case) -> Any:
    return pytree.tree_map(lambda leaf: _leaf(leaf, case.against == "lazy"), tree)


def _leaf(leaf: Any, layout: bool) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    kind = (str(leaf.dtype), leaf.requires_grad)
    found = leaf.detach().cpu()
    if layout:
        kind += (str(getattr(leaf, "sharding_spec", None)),)
    return kind, (found.float() if found.dtype == torch.bfloat16 else found).numpy().copy()


def _pattern(outcomes: list[Outcome]) -> list[Outcome]:
    """Each result replaced by the number of the first call that gave the same."""
    seen: list[bytes] = []
    found = []
    for outcome in outcomes:
        if outcome.error is not None:
            found.append(outcome)
            continue
        raw = b"".join(
            leaf.tobytes()
            for leaf in pytree.tree_leaves(outcome.result)
            if isinstance(leaf, np.ndarray)
        )
        seen.append(raw)
        found.append(Outcome(seen.index(raw), None))
    return found


def _compare(got: Any, want: Any, rtol: float, what: str) -> None:
    mine, shape = pytree.tree_flatten_with_path(got)
    theirs, wanted = pytree.tree_flatten_with_path(want)
    if shape != wanted:
        raise SilentChangeError(f"{what} is {shape}, and must be {wanted}")
    for (path, one), (_, other) in zip(mine, theirs, strict=True):
        where = f"{what}{pytree.keystr(path)}"
        if isinstance(other, np.ndarray):
            if not _close(one, other, rtol):
                raise SilentChangeError(f"{where} is\n{one}\nand must be\n{other}")
        elif isinstance(other, float) and isinstance(one, float):
            if not np.isclose(one, other, rtol=rtol, equal_nan=True):
                raise SilentChangeError(f"{where} is {one}, and must be {other}")
        elif one != other:
            raise SilentChangeError(f"{where} is {one!r}, and must be {other!r}")


def _close(one: Any, other: np.ndarray, rtol: float) -> bool:
    """Equal up to rounding, which goes by the largest number; infinities and NaN too."""
    if not isinstance(one, np.ndarray) or one.shape != other.shape:
        return False
    if other.dtype.kind not in "fc":
        return np.array_equal(one, other)
    largest = np.abs(other[np.isfinite(other)]).max(initial=1)
    return np.allclose(one, other, rtol=rtol, atol=rtol * largest, equal_nan=True)


def _put_back(world: World) -> None:
    """Globals and classes must not stay as the edits left them: the last puts back what was."""
    with contextlib.suppress(Exception):
        world.edits[-1]()


@contextlib.contextmanager
def _restored() -> Iterator[None]:
    """Leave torch's and JAX's settings as they were, whatever a case has done."""
    dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setenv("ISOSHARD_TEST_SCALE", "2.0")
        stack.callback(torch.set_default_dtype, dtype)
        stack.callback(torch.set_float32_matmul_precision, precision)
        stack.callback(torch.use_deterministic_algorithms, False)
        stack.callback(torch.set_grad_enabled, True)
        stack.callback(os.chdir, Path.cwd())
        torch.default_generator.manual_seed(0)
        torch.get_device_module("jax").manual_seed_all(0)
        yield
