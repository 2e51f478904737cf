"""One operator, three ways: ONNX Runtime or onnx's reference, JAX on one device, JAX on eight."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper
from onnx.reference import ReferenceEvaluator

from isoshard.core.layout.mesh import make_mesh
from isoshard.onnx_bridge import ModelError
from isoshard.onnx_bridge.executor import evaluate
from isoshard.onnx_bridge.executor.operators import find, on_mesh
from isoshard.onnx_bridge.executor.operators.registry import HOST_LIMIT
from isoshard.onnx_bridge.reading import Graph

RNG = np.random.default_rng(7)


def floats(*shape: int, dtype=np.float32) -> np.ndarray:
    """Normal numbers."""
    return RNG.standard_normal(shape).astype(dtype)


def positive(*shape: int) -> np.ndarray:
    """Numbers in 0.5..2."""
    return RNG.uniform(0.5, 2, shape).astype(np.float32)


def integers(*shape: int, low=-5, high=6, dtype=np.int64) -> np.ndarray:
    """Integers below `high`."""
    return RNG.integers(low, high, shape).astype(dtype)


def ints(*values: int) -> np.ndarray:
    """A known list: a shape, axes."""
    return np.array(values, np.int64)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One node with its inputs.

    Attributes:
        op: the operator.
        inputs: its inputs; None for one that is left out.
        attributes: its attributes.
        known: positions of inputs that are known while compiling.
        opset: version.
        outputs: how many results are asked for.
        split: which axis of which input is split over eight devices; None: no run on eight.
        oracle: "ort", "reference", or a function of the inputs.
        gradient: gradients of float inputs are taken; by default of every second that runs on
            eight devices.
        tolerance: absolute and relative.
        note: what is special.
    """

    op: str
    inputs: tuple[Any, ...]
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    known: tuple[int, ...] = ()
    opset: int = 21
    outputs: int = 1
    split: dict[int, int] | None = None
    oracle: str | Callable[..., Any] = "ort"
    gradient: bool | None = None
    tolerance: float = 1e-5
    note: str = ""

    def __post_init__(self) -> None:
        arrays = tuple(None if x is None else np.asarray(x) for x in self.inputs)
        object.__setattr__(self, "inputs", arrays)

    def __str__(self) -> str:
        return "-".join([self.op, str(self.opset), *([self.note] if self.note else [])])

    @functools.cached_property
    def model(self) -> onnx.ModelProto:
        """A model of this node alone."""
        names = [f"x{k}" if x is not None else "" for k, x in enumerate(self.inputs)]
        results = [f"y{k}" for k in range(self.outputs)]
        node = helper.make_node(self.op, names, results, **self.attributes)
        given = [
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
            for name, x in zip(names, self.inputs, strict=True)
            if name
        ]
        made = [helper.make_empty_tensor_value_info(name) for name in results]
        graph = helper.make_graph([node], "one", given, made)
        imports = [helper.make_opsetid("", self.opset)]
        return helper.make_model(graph, opset_imports=imports, ir_version=10)

    @property
    def given(self) -> dict[str, np.ndarray]:
        """The inputs by name."""
        return {f"x{k}": x for k, x in enumerate(self.inputs) if x is not None}

    @property
    def unknown(self) -> dict[str, np.ndarray]:
        """The inputs that are arguments of the program."""
        return {name: x for name, x in self.given.items() if int(name[1:]) not in self.known}

    def results(self, values: dict[str, Any]) -> list[Any]:
        """The outputs, of values for the unknown inputs."""
        graph = Graph(self.model)
        found = evaluate(graph.nodes, {**self.given, **values}, graph.opsets)
        return [found[name] for name in graph.outputs]


def expected(case: Case) -> list[np.ndarray]:
    """What the oracle says."""
    if callable(case.oracle):
        found = case.oracle(*case.inputs)
        return list(found) if isinstance(found, tuple) else [found]
    if case.oracle == "reference":
        return ReferenceEvaluator(case.model).run(None, case.given)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(
        case.model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    return session.run(None, case.given)


def check(cases: list[Case]) -> None:
    """Compare all ways. All cases together are one program for each way, which compiles faster."""
    wanted = {case: expected(case) for case in cases}
    for number, case in enumerate(case for case in cases if case.split is not None):
        if case.gradient is None:
            object.__setattr__(case, "gradient", number % 2 == 0)
    found = jax.jit(lambda values: _each(cases, values))([case.unknown for case in cases])
    alone = dict(zip(cases, found, strict=True))
    for case in cases:
        with _named(case):
            gradients, results = alone[case]
            _compare(results, wanted[case], case.tolerance)
            for slope in gradients.values():
                assert np.isfinite(np.asarray(slope, np.float32)).all()
            small = all(np.size(y) <= HOST_LIMIT for y in wanted[case])
            if find("", case.op, case.opset).host is not None and small:
                _compare(evaluate_known(case), wanted[case], case.tolerance, exact_dtype=True)
    # Operators are computed under Auto axes, whatever the types of the user's mesh.
    mesh = make_mesh((8,), ("x",), axis_types=jax.sharding.AxisType.Auto)
    split = [case for case in cases if case.split is not None]

    def program(values):
        with on_mesh(mesh):
            return _each(split, values)

    placed = [
        {name: _placed(mesh, name, x, case.split) for name, x in case.unknown.items()}
        for case in split
    ]
    for case, (gradients, results) in zip(split, jax.jit(program)(placed), strict=True):
        with _named(case):
            _compare(results, wanted[case], case.tolerance)
            for key, slope in alone[case][0].items():
                tolerance = 10 * case.tolerance
                pair = (np.asarray(one, np.float64) for one in (gradients[key], slope))
                np.testing.assert_allclose(*pair, atol=tolerance, rtol=tolerance)


def _each(cases: list[Case], values: list[dict[str, Any]]) -> list[Any]:
    """Gradients and results of each case."""
    return [_with_gradients(case, one) for case, one in zip(cases, values, strict=True)]


def _with_gradients(case: Case, values: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    inexact = {k: v for k, v in values.items() if jnp.issubdtype(v.dtype, jnp.floating)}
    rest = {k: v for k, v in values.items() if k not in inexact}

    def loss(inexact):
        found = [jnp.asarray(y) for y in case.results({**inexact, **rest})]
        return sum(_weighed(y) for y in found), found

    if not (case.gradient and inexact):
        return {}, loss(inexact)[1]
    return jax.grad(loss, has_aux=True)(inexact)


@contextlib.contextmanager
def _named(case: Case) -> Iterator[None]:
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{case}: {error}") from None


def check_refused(cases: list[tuple[Case, str]]) -> None:
    """Each case raises a message."""
    for case, message in cases:
        with pytest.raises(ModelError, match=message):
            jitted(case)


def evaluate_known(case: Case) -> list[Any]:
    """The results where all inputs are known: NumPy arrays."""
    graph = Graph(case.model)
    found = evaluate(graph.nodes, case.given, graph.opsets)
    results = [found[name] for name in graph.outputs]
    assert all(isinstance(y, np.ndarray) for y in results)
    return results


def jitted(case: Case) -> list[jax.Array]:
    """The results with unknown inputs, but for the known."""
    return jax.jit(case.results)(case.unknown)


def _placed(mesh, name: str, x: np.ndarray, split: dict[int, int]) -> jax.Array:
    axis = split.get(int(name[1:]))
    spec = [None] * x.ndim
    if axis is not None:
        spec[axis] = "x"
    host = x.astype(jax.dtypes.canonicalize_dtype(x.dtype))
    return jax.device_put(host, jax.NamedSharding(mesh, jax.P(*spec)))


def _weighed(y: jax.Array) -> jax.Array:
    if not jnp.issubdtype(y.dtype, jnp.floating):
        return jnp.zeros(())
    weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
    return jnp.sum(jnp.where(jnp.isfinite(y), y, 0).astype(jnp.float32) * weights)


def _compare(found, wanted, tolerance: float, exact_dtype: bool = False) -> None:
    assert len(found) == len(wanted)
    for ours, theirs in zip(found, wanted, strict=True):
        theirs = np.asarray(theirs)
        dtype = theirs.dtype if exact_dtype else jax.dtypes.canonicalize_dtype(theirs.dtype)
        assert (ours.dtype, ours.shape) == (dtype, theirs.shape)
        np.testing.assert_allclose(
            np.asarray(ours).astype(np.float64),
            theirs.astype(np.float64),
            atol=tolerance,
            rtol=tolerance,
        )
