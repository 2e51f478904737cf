"""What runs in a worker process: samples of an entry recorded, and their program exported.

All samples of the columns asked for are one program, as in `tests.conformance.entry`. It is not
executed but written down for another platform, as `jax.export` serializes it; `compiling.py`
compiles it where that platform's compiler is installed.
"""

from __future__ import annotations

import contextlib
import itertools
import types
import unittest.mock
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .artifacts import Artifact, Exported, keep, reason_of

SAMPLES = {"tpu": 1, "cuda": 2}
"""Samples of each column: others differ in shapes. A TPU's compiler takes ten times as long."""

PLATFORMS = {"tpu": "tpu", "cuda": "gpu"}
"""What `jax.export` calls a platform -> what devices do."""


class Noted(MemoryError):
    """Ends an execution whose program is wanted and not its results; memory errors keep a tape."""


def start(folder: Path, platform: str) -> Callable[..., Exported]:
    """Set a process up.

    Args:
        folder: for the programs.
        platform: to export for, "tpu" or "cuda".

    Returns:
        A function of an entry's name and some columns, which exports one program of them all.
    """
    import isoshard as iso

    iso.simulate_devices(1)  # before torch and the database, which make tensors
    import numpy as np
    import torch

    from tests.conformance import entry
    from tests.conformance.columns import COLUMNS
    from tests.conformance.database import entries
    from tests.conformance.expected import EXPECTED
    from tests.conformance.samples import DEVICE

    torch.set_num_threads(1)
    torch.empty(0, device=DEVICE)  # from now on it is there, for functions that ask
    warnings.simplefilter("ignore")
    known = entries()

    def run(name: str, columns: Sequence[str]) -> Exported:
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002  (torch.testing draws from it)
        attempts: dict[str, list[Any]] = {}
        for column in columns:
            if (name, column) in EXPECTED:  # of no device
                continue
            found = entry.attempts_of(known[name], COLUMNS[column], SAMPLES[platform])
            if not isinstance(found, str):
                attempts[column] = found
        if not attempts:
            return Exported((), (), ())
        have = tuple(attempts)
        try:
            plans = recorded(known[name], [*itertools.chain(*attempts.values())], platform)
        except Exception as error:
            return Exported(have, (), (Artifact(name, have, platform, "", reason_of(error)),))
        host = tuple(column for column in have if any(one.host for one in attempts[column]))
        programs = [exported(name, have, platform, plan, folder) for plan in plans]
        return Exported(have, host, tuple(programs))

    return run


def recorded(info: Any, attempts: Sequence[Any], platform: str) -> list[Any]:
    """The programs of samples, with the shapes of what they take.

    What an operator on the host needs is computed here; the last program, which holds all results,
    is not.

    Args:
        info: the entry.
        attempts: its samples.
        platform: that they are recorded as for; see `off_cpu`.
    """
    import jax

    import isoshard.torch_bridge as xs
    from isoshard.torch_bridge.engine.compiling import program
    from isoshard.torch_bridge.engine.subprograms import off_cpu
    from tests.conformance import entry

    xs.sync()  # what was recorded before is no part of them
    found: list[Any] = []
    usual = program.program_of
    last = False

    def noting(plan: Any, arrays: Any, lean: Any = None, equal: Any = None) -> Any:
        found.append((plan, [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]))
        if last:
            raise Noted
        return usual(plan, arrays, lean, equal)

    with (
        unittest.mock.patch.object(program, "program_of", noting),
        unittest.mock.patch.object(program, "_cached_before", lambda key: None),
        unittest.mock.patch.dict(program._LEAN, clear=True),
        unittest.mock.patch.object(off_cpu, "platform", lambda: PLATFORMS[platform]),
        contextlib.suppress(Noted),
    ):
        for attempt in attempts:
            attempt.random = (
                False  # or it is recorded twice, to see that a seed repeats its numbers
            )
            entry._record(info, attempt)
        last = True
        xs.sync()
    return found


def exported(
    entry: str, columns: tuple[str, ...], platform: str, plan: Any, folder: Path
) -> Artifact:
    """Write a program down for a platform.

    Args:
        entry: see `Artifact`.
        columns: likewise.
        platform: likewise.
        plan: the program, and the shapes of what it takes.
        folder: for programs.
    """
    import jax
    from jax import export

    from isoshard.core.runtime._jax_internals import no_locations
    from isoshard.torch_bridge.engine.compiling import plan_lowering

    request, structs = plan
    try:
        with plan_lowering.tracing(request, structs), _with_cusolver(), no_locations():
            function = jax.jit(plan_lowering.traceable(request), keep_unused=True)
            anything = [export.DisabledSafetyCheck.custom_call("ALL")]
            made = export.export(function, platforms=[platform], disabled_checks=anything)
            data = bytes(made(*structs, *plan_lowering.extra_inputs(request)).serialize())
    except Exception as error:
        return Artifact(entry, columns, platform, "", reason_of(error))
    return Artifact(entry, columns, platform, keep(folder, data, platform))


def _with_cusolver() -> contextlib.AbstractContextManager[Any]:
    """Context in which JAX lowers as where CUDA's wheels are installed, as they are for users.

    JAX asks the library for its version when it lowers `eig`, and there is none beside us.
    """
    from jax._src.lax import linalg

    known = types.SimpleNamespace(cusolver_get_version=lambda: 11701)
    return unittest.mock.patch.object(linalg, "cuda_versions", known)
