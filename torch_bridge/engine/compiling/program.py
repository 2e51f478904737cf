"""From a tape to one compiled XLA program, and back to values.

`execute(tape)` finds which results are still alive, places the inputs, looks the tape up among the
programs compiled before, compiles on a miss, runs, and hands the arrays to their values. Inputs
that have no references left are donated: their memory becomes the outputs'.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import operator
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from isoshard.core.layout import custom_partitioning
from isoshard.core.layout.mesh import mesh_of
from isoshard.core.runtime import caches, compilation_cache, metrics, samples, serialize_virtual
from isoshard.core.runtime.caches import PROGRAMS, Bounded
from isoshard.torch_bridge.engine.recording import random_state, regions
from isoshard.torch_bridge.engine.recording.recipes import Recipe
from isoshard.torch_bridge.engine.recording.recorder import recorder, replace, wire_execute
from isoshard.torch_bridge.engine.recording.tape import Tape
from isoshard.torch_bridge.engine.values import sharding_ids as layouts
from isoshard.torch_bridge.engine.values.value import (
    Value,
    donated_error,
    first_donated,
    placed_layout,
)

from . import long_compilations, recompile_reasons
from .compile_request import Blocks, CompileRequest, request_of
from .dynamic_indices import with_dynamic_indices
from .equal_floats import EqualFloats, equal_now
from .failed_ops import explain, is_of_an_operation, mark_failed
from .input_placement import place
from .interpreting import set_entry_index
from .interrupts import Uninterrupted
from .nan_search import first_nan
from .padded_blocks import padded, wrapped
from .plan_lowering import lowered
from .result_meshes import coarser_sharding, result_layouts


@dataclasses.dataclass(eq=False)
class Program:
    """One compiled tape.

    Attributes:
        compiled: the XLA executable.
        layouts: the layout of each output, known after the first run.
        donated_bytes: per execution, over all devices.
        blocks: the layout of each output that comes in blocks with padding; empty if none does.
        recipes: those of its entries; referenced, so that the same code finds this program again.
        replicated: the layout of lifted floats and random words, if an input decides which.
        several: whether it runs on several devices.
        calls_host: whether it calls Python while it runs.
        unnamed: the results whose layout is no `NamedSharding`: JAX 0.9's XLA splits by parts of
            an axis.
        arrangement: of a program with equal layers as loops, see `rolled_plan`.
        equal: which lifted floats are one input; None if each is one.
        starts: when it was run, the latest times, by `time.perf_counter`.
    """

    compiled: Any
    layouts: list[int] | None = None
    donated_bytes: int = 0
    blocks: Blocks = ()
    recipes: frozenset[Recipe] = frozenset()
    replicated: jax.sharding.Sharding | None = None
    several: bool = False
    calls_host: bool = False
    unnamed: tuple[int, ...] = ()
    arrangement: Any = None
    equal: EqualFloats | None = None
    starts: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=65)
    )
    _uploaded: dict[str, tuple[np.ndarray, jax.Array | np.ndarray]] = dataclasses.field(
        default_factory=dict
    )

    def upload(self, name: str, values: np.ndarray) -> jax.Array | np.ndarray:
        """Bring lifted floats or random words to the devices, unless they are there already.

        Numbers that changed since the last run may change again: for a single device, they are
        left to the call, which brings them along at a tenth of the cost.

        Args:
            name: which of the two.
            values: their present values, which do not change any more.
        """
        cached = self._uploaded.get(name)
        same = cached is not None and (
            cached[0] is values or cached[0].tobytes() == values.tobytes()  # 0.0 is not -0.0
        )
        if cached is not None and same and isinstance(cached[1], jax.Array):
            return cached[1]
        started = time.perf_counter()
        moves = cached is not None and not same and self.replicated is None
        with jax.enable_x64(True):
            array = values if moves else jax.device_put(values, self.replicated)
        if values.size:
            seconds = None if moves else time.perf_counter() - started
            where = f"(changing {name})"
            metrics.record_transfer("host_to_device", values.nbytes, where, seconds)
        self._uploaded[name] = (values, array)
        return array

    def uploaded(self, name: str) -> jax.Array | np.ndarray | None:
        """What is on the devices already, if anything is: of no numbers at all, all that is."""
        cached = self._uploaded.get(name)
        return None if cached is None or cached[0].size else cached[1]

    def separate(self, plan: CompileRequest, arrays: Sequence[jax.Array]) -> None:
        """Compile again, with an input for each lifted float: equal ones are equal no more."""
        with _EXECUTING:
            if self.equal is None:  # another thread has done it
                return
            started = time.perf_counter()
            program = build(plan, arrays)
            recompile_reasons.report(plan, time.perf_counter() - started, _DIFFERENT)
            vars(self).update(vars(program))  # in one go: other threads may run it

    def text(self) -> str:
        """The optimised HLO."""
        return self.compiled.as_text()


_DIFFERENT = "floats that were equal differ: each is an input from now on"
_FORM = operator.attrgetter("equal", "compiled")  # in one go, likewise


KEPT = 1024
"""Compiled programs kept in memory; beyond, the one not used for longest goes."""

_PROGRAMS: dict[Any, Program] = {}
_LEAN: weakref.WeakValueDictionary[Any, Program] = weakref.WeakValueDictionary()
"""The same by what of their entries is of use."""

WATCHING: list[Callable[[Program, CompileRequest], None]] = []
"""Called after each execution, with what was executed."""


def sync() -> None:
    """Execute everything that this thread recorded.

    Raises:
        Exception: of the first operation that failed; what does not depend on it is computed.
    """
    tape = recorder()
    if isinstance(tape, Tape) and tape.program and not tape.plans:
        execute(tape)
        if tape.error is not None:
            raise tape.error


def forget_unseen() -> None:
    """Drop what this thread recorded if nothing of it is referenced any more.

    It would not be computed, but the meshes of its inputs would still be those of the next program.
    """
    tape = recorder()
    if not isinstance(tape, Tape) or tape.plans or tape.capture is not None or tape.regions:
        return
    with tape.lock:
        if not tape.program or request_of(tape).live:
            return
        tape.done = True
    replace(tape.renewed())
    tape.forget()


def execute(tape: Tape, only: Value | None = None) -> None:
    """Run a tape; afterwards each value still in use has its array.

    Values that depend on an operation which fails have failed, the others are computed; see
    `failed_ops`. Where no operation is found at fault, such as where memory does not suffice, the
    error is raised and the tape is kept: values are then computed one at a time, when they are
    asked for.

    Raises:
        CaptureError: a step is being captured on this tape.
        RuntimeError: a region of the script allows no execution, or no other program.
    """
    tape.check_execution()
    if tape is recorder():
        regions.check(tape)
    tape.remember()
    with _EXECUTING:
        _execute(tape, only)


_EXECUTING = threading.RLock()


def _execute(tape: Tape, only: Value | None) -> None:
    if recorder() is tape:
        replace(tape.renewed())
    if tape.done and not tape.slots:  # another thread needed a value of it and has executed it
        return
    while not _computed(tape, only):
        pass


def _computed(tape: Tape, only: Value | None) -> bool:
    """Compute a tape; False if it is to be tried again: without an operation that failed."""
    with tape.lock:
        tape.done = True
        plan = request_of(tape)
    if only is not None:
        plan.live, plan.result_layouts, plan.donated = (only.slot,), (only.layout,), ()
    if not plan.live:
        tape.forget()
        return True
    again, tape.failed = tape.failed, True
    also = {*tape.marks, *plan.result_layouts} - {layouts.UNPLACED}
    inputs = tape.inputs()
    arrays = padded(place(inputs, also))
    plan.placed = tuple(input_.layout for input_ in inputs)
    recorder().check_process()
    requested, scalars = plan, tape.scalars
    try:
        program = _cached_before(plan.key())
        if program is None:
            program, arrays = _with_copies(plan, arrays)
        if program is None:
            lean = plan.lean()
            cached = _LEAN.get(lean.key())  # one that differs in entries of no use
            if cached is not None:
                program = cached_program(plan.key(), lambda cached=cached: cached)
            else:
                if not again:
                    requested, scalars = with_dynamic_indices(plan, lean, scalars)
                program = program_of(
                    requested,
                    arrays,
                    lean if requested is plan else None,
                    equal_now(requested.program, scalars),
                )
            if len(plan.donated) >= len(_DONATED.get(plan.donation_key(), ())):
                _DONATED[plan.donation_key()] = plan.donated
        with Uninterrupted():  # from here on, donated inputs are gone
            results = run(program, requested, arrays, scalars, tape.words)
            _hand_out(tape, plan, results, program)
    except Exception as error:
        lost = first_donated(arrays)
        if lost is not None:
            raise donated_error(tuple(lost.shape)) from error
        if only is not None or not is_of_an_operation(error, arrays):
            raise
        if requested is not plan:  # what fails is found in the program as it was recorded
            return False
        if not mark_failed(tape, plan, error, lambda request: _fails(request, arrays, tape)):
            raise
        tape.error = tape.error or error
        return False
    if only is None:
        tape.forget()
        while tape.printed:
            tape.printed.pop(0).show()
    return True


MAX_COPIED_RUNS = 3
"""Runs of a program with copies of inputs that it overwrites, before it is compiled without."""
_COPIED_RUNS: Bounded[Any, int] = Bounded(PROGRAMS, "engine: runs with copied inputs")
_DONATED: Bounded[Any, tuple[int, ...]] = Bounded(PROGRAMS, "engine: inputs of kept programs")


def _with_copies(
    plan: CompileRequest, arrays: list[jax.Array]
) -> tuple[Program | None, list[jax.Array]]:
    """A kept program that overwrites more inputs than it may, and copies for it to overwrite.

    After a checkpoint was loaded, the parameters share their elements with what was read from the
    file. To copy them once is cheaper than to compile the step for inputs that it must not
    overwrite, which from the next call on it may.

    Returns:
        The program, or None, and its inputs.
    """
    key = plan.donation_key()
    donated = _DONATED.get(key)
    if donated is None or not set(plan.donated) < set(donated):
        return None, arrays
    runs = _COPIED_RUNS.get(plan.key(), 0)
    program = None if runs == MAX_COPIED_RUNS else _cached_before((*key, donated))
    if program is None:
        return None, arrays
    _COPIED_RUNS[plan.key()] = runs + 1
    arrays = list(arrays)
    with jax.enable_x64(True):
        for index in set(donated) - set(plan.donated):
            metrics.count("copies")
            metrics.count("copied_bytes", arrays[index].nbytes)
            arrays[index] = jnp.copy(arrays[index])
    return program, arrays


def _hand_out(
    tape: Tape, plan: CompileRequest, results: Sequence[jax.Array], program: Program
) -> None:
    for slot, array, layout_id in zip(plan.live, results, program.layouts or (), strict=True):
        value = tape.value(slot)
        if value is not None:
            value.layout, value.array, value.tape = layout_id, array, None  # in this order


def _fails(request: CompileRequest, arrays: Sequence[jax.Array], tape: Tape) -> bool:
    """Whether a part of a program cannot be executed."""
    try:
        program = build(request, arrays)
        jax.block_until_ready(list(run(program, request, arrays, tape.scalars, tape.words)))
    except Exception:
        return True
    return False


def program_of(
    plan: CompileRequest,
    arrays: Sequence[jax.Array],
    lean: CompileRequest | None = None,
    equal: EqualFloats | None = None,
) -> Program:
    """Find the program of a plan, compiling it the first time.

    A plan that another one differs from in nothing but entries of no use has its program.

    Args:
        plan: what to compile.
        arrays: its inputs.
        lean: the plan without entries of no use, if it is at hand.
        equal: which lifted floats are one input, if it is compiled.
    """

    def compiled() -> Program:
        key = (lean or plan.lean()).key()
        program = _LEAN.get(key)
        if program is None:
            started = time.perf_counter()
            program = _LEAN[key] = build(plan, arrays, equal=equal)
            recompile_reasons.report(plan, time.perf_counter() - started)
        return program

    return cached_program(plan.key(), compiled)


def cached_program(key: Any, compiled: Callable[[], Program]) -> Program:
    """The program of a key, made the first time."""
    with _EXECUTING:
        program = _cached_before(key)
        if program is None:
            program = compiled()
            _make_room()
            _PROGRAMS[key] = program
    return program


def _cached_before(key: Any) -> Program | None:
    """The program of a key, if it is kept."""
    with _EXECUTING:
        program = _PROGRAMS.pop(key, None)
        if program is not None:
            _PROGRAMS[key] = program  # last again: the first is the one not used for longest
    return program


def compiled_count() -> int:
    """How many compiled programs are kept in memory."""
    return len(set(map(id, _PROGRAMS.values())))


def _forget() -> None:
    """Drop all programs."""
    with _EXECUTING:
        _PROGRAMS.clear()


caches.register("engine: compiled programs", KEPT, lambda: len(_PROGRAMS), _forget)


def _make_room() -> None:
    """Drop the programs not used for longest, where there are too many for us or for the system."""
    count = len(_PROGRAMS) // 2 if _is_crowded() else KEPT - 1
    while len(_PROGRAMS) > count:
        del _PROGRAMS[next(iter(_PROGRAMS))]
        metrics.count("evictions")


_MAPS = Path("/proc/self/maps")
_MAP_LIMIT = Path("/proc/sys/vm/max_map_count")
MAP_SHARE = 0.5
"""Of the memory mappings that Linux allows a process: above it programs are dropped.

XLA on CPUs keeps each program in mappings of its own, hundreds for a training step, and ends the
process when it gets no more; 65,530 are allowed by default.
"""


def _is_crowded(share: float | None = None) -> bool:
    """Whether programs should be dropped; never on systems that do not report mappings.

    Args:
        share: of the mappings that are allowed, above which they should; None is `MAP_SHARE`.
    """
    try:
        allowed = int(_MAP_LIMIT.read_text())
        used = _MAPS.read_bytes().count(b"\n")
    except OSError:
        return False
    return used > (MAP_SHARE if share is None else share) * allowed


def build(
    plan: CompileRequest,
    arrays: Sequence[jax.Array],
    lower: Callable[[], jax.stages.Lowered] | None = None,
    equal: EqualFloats | None = None,
) -> Program:
    """Compile a plan for inputs placed as `arrays` are.

    Args:
        plan: what to compile.
        arrays: its inputs.
        lower: makes StableHLO of it; None as it was recorded.
        equal: which lifted floats are one input.
    """
    lower = lower or (lambda: lowered(plan, arrays, equal, keep_unused=True))
    compilation_cache.by_default()
    operations = sum(isinstance(entry[0], int) for entry in plan.program)
    with long_compilations.reported(operations), warnings.catch_warnings():
        # An input that is not needed any more is donated even where no result can take its memory.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        hits = compilation_cache.hits()
        # An unused input is kept: without any on a mesh, it would be compiled for one device.
        compiled = custom_partitioning.compiled(lower, lambda: plan.options)
    metrics.count("cache_hits", compilation_cache.hits() - hits)
    analysis = compiled.memory_analysis()
    metrics.record_peak(peak_bytes(analysis))
    devices = max((len(array.sharding.device_set) for array in arrays), default=1)
    donated = getattr(analysis, "alias_size_in_bytes", 0) * devices
    taken = jax.tree.leaves(compiled.input_shardings)  # a mark may name a mesh that no input has
    shardings = enumerate(jax.tree.leaves(compiled.output_shardings))
    plain = (jax.sharding.NamedSharding, jax.sharding.SingleDeviceSharding)
    return Program(
        compiled,
        donated_bytes=donated,
        blocks=plan.blocks,
        recipes=plan.recipes,
        replicated=plan.replicated(),
        several=any(len(sharding.device_set) > 1 for sharding in taken),
        calls_host=plan.calls_host,
        unnamed=tuple(n for n, sharding in shardings if not isinstance(sharding, plain)),
        equal=equal,
    )


def peak_bytes(analysis: Any) -> int:
    """What a program needs on each device: inputs, results that replace none, temporaries.

    Args:
        analysis: XLA's memory analysis; None where the platform gives none.
    """
    if analysis is None:
        return 0
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return analysis.argument_size_in_bytes + results + analysis.temp_size_in_bytes


def run(
    program: Program,
    plan: CompileRequest,
    arrays: Sequence[jax.Array],
    scalars: Sequence[float] | np.ndarray,
    words: list[random_state.Word],
) -> Sequence[jax.Array]:
    """Execute a program."""
    recorder().check_process()
    if not isinstance(scalars, np.ndarray):
        scalars = np.asarray(scalars, np.float64)
    if program.equal is not None and not program.equal.fit(scalars):
        program.separate(plan, arrays)
    equal, compiled = _FORM(program)
    floats = program.upload("floats", scalars if equal is None else equal.distinct(scalars))
    uploaded = program.uploaded("words") if not words else None
    seeds = program.upload("words", random_state.as_input(words)) if uploaded is None else uploaded
    # What runs on one device waits for no other device.
    with serialize_virtual.turn if program.several else _ALONE as note:
        started = time.perf_counter()
        program.starts.append(started)
        with jax.enable_x64(True):  # for floats that the call brings along
            try:
                computed = compiled(*arrays, floats, seeds)
            except Exception as error:
                if not plan.settings.checked or "FloatingPoint" not in type(error).__name__:
                    raise
                # JAX's own class for it is none of Python's, and private.
                checked = FloatingPointError(f"invalid value ({error.args[-1]}) in a result")
                _name_operation(checked, plan, arrays, scalars, seeds)
                raise checked from None
        if program.calls_host:  # what Python raises is to be known now
            jax.block_until_ready(computed)
        note(computed)
    if program.unnamed and isinstance(program.replicated, jax.sharding.NamedSharding):
        computed, mesh = [*computed], mesh_of(program.replicated)
        for n in program.unnamed:
            layout = coarser_sharding(computed[n].sharding, computed[n].shape, mesh)
            computed[n] = jax.device_put(computed[n], layout)
    results = wrapped(computed, program.blocks)
    samples.observe("execute_seconds", time.perf_counter() - started)
    metrics.count("executions")
    metrics.count("donated_bytes", program.donated_bytes)
    if program.layouts is None:
        program.layouts = result_layouts(plan, [placed_layout(array) for array in results])
    for watch in WATCHING:
        watch(program, plan)
    return results


def _compiled(plan: CompileRequest, arrays: Sequence[jax.Array], lower: Any) -> Any:
    return build(plan, arrays, lower).compiled


def _name_operation(
    error: FloatingPointError, plan: CompileRequest, arrays: Sequence[jax.Array], *extra: Any
) -> None:
    """Note in an error of `jax_debug_nans` which operation is at fault.

    Args:
        error: of a program's results.
        plan: what was run.
        arrays: its inputs.
        extra: lifted floats and random words.
    """
    if first_donated(arrays) is not None:
        error.add_note(
            "the program was compiled before jax_debug_nans was set, and has overwritten its "
            "inputs; set it before the first call to learn which operation is at fault"
        )
        return
    floats, words = extra
    index = first_nan(plan, arrays, floats, words, _compiled)
    if index is None:
        return
    if isinstance(plan.program[index][0], int):
        set_entry_index(error, index)
    explain(error, plan, index)


_ALONE = contextlib.nullcontext(lambda results: None)

wire_execute(execute)
