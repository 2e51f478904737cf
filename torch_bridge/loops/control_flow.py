"""torch's control flow on the device: `torch.cond`, and `while_loop`, `scan` and `map`.

torch traces their functions with dynamo, and passes graphs with the tensors that these take. Each
operator becomes JAX's operation of that name, as one entry of the tape: nothing is read on the
host, also where the number of steps depends on values. `out_dtype`, another operator over an
operator, is a product of int8 in int32.

>>> import torch, isoshard.torch_bridge
>>> from torch._higher_order_ops import while_loop
>>> start = (torch.tensor(0, device="jax"), torch.tensor(1.0, device="jax"))
>>> while_loop(lambda n, x: x < 1000, lambda n, x: (n + 1, x * 3), start)
(tensor(7, device='jax:0'), tensor(2187., device='jax:0'))

Where a carry is one of Python's integers, a graph writes to tensors from around, or reads a value
(as the gradient of `while_loop` does), torch's own code runs the graphs one after the other, and
reads the condition in each step: a call that is counted as one of `fallbacks`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from isoshard.core.runtime import metrics
from isoshard.core.runtime.caches import PROGRAMS, Bounded
from isoshard.core.runtime.private_names import optional
from isoshard.torch_bridge._torch_internals import dispatcher, higher_order_ops, pytree
from isoshard.torch_bridge.engine.operators.call_template import import_tensor
from isoshard.torch_bridge.engine.recording import lazy_tensor
from isoshard.torch_bridge.engine.recording import tape as tapes
from isoshard.torch_bridge.engine.recording.memory_log import logged_to
from isoshard.torch_bridge.engine.recording.recipes import Recipe
from isoshard.torch_bridge.engine.values.value import Aval, Value

from ..common.after_import import after_import
from ..tensors.tensor import XLAShardedTensor

Arrays = list[Any]


def register() -> None:
    """Register the operators for the device, and the device's tensors with dynamo."""
    rules = {
        higher_order_ops.COND: _cond,
        higher_order_ops.WHILE: _while,
        higher_order_ops.STACKED_WHILE: None,
        higher_order_ops.SCAN: _scan,
        higher_order_ops.MAP: _map,
    }
    for row, rule in rules.items():
        operator = row.resolve(None)
        if operator is None:
            continue
        with optional():
            in_torch = operator.py_kernels[dispatcher.DispatchKey.CompositeExplicitAutograd]
            in_python = functools.partial(_counted, operator.name(), in_torch)
            implementation = (
                in_python if rule is None else functools.partial(_by_rule, rule, in_python)
            )
            operator.py_impl(XLAShardedTensor)(implementation)
    operator = getattr(torch.ops.higher_order, "out_dtype", None)
    if operator is not None:
        with optional():
            in_torch = operator.py_kernels[dispatcher.DispatchKey.CompositeExplicitAutograd]
            operator.py_impl(XLAShardedTensor)(functools.partial(_with_out_dtype, in_torch))
    after_import(higher_order_ops.DYNAMO, _teach_dynamo)


def _with_out_dtype(in_torch: Any, operator: Any, dtype: torch.dtype, *args: Any) -> Any:
    """`out_dtype(mm, int32, a, b)`: a product of int8 as one; anything else in torch's widths."""
    factors = [arg.dtype for arg in args if isinstance(arg, torch.Tensor)]
    if operator is torch.ops.aten.mm.default and factors == [torch.int8] * 2:
        if dtype is torch.int32:
            return torch.ops.aten._int_mm.default(*args)
    return in_torch(operator, dtype, *args)


def _counted(name: str, in_python: Any, *args: Any, **kwargs: Any) -> Any:
    """The operator in Python, which waits for values; counted as a fallback."""
    metrics.count("fallbacks")
    metrics.count(f"fallbacks.higher_order::{name}")
    return in_python(*args, **kwargs)


def _by_rule(rule: Any, in_python: Any, *args: Any, **kwargs: Any) -> Any:
    """The operator by its rule, or in Python; not traced by dynamo, in whose program it runs."""
    unseen: Any = torch.compiler.disable(_by_rule_or_in_python)
    return unseen(rule, in_python, *args, **kwargs)


def _by_rule_or_in_python(rule: Any, in_python: Any, *args: Any, **kwargs: Any) -> Any:
    """The operator by its rule, or in Python where the rule does not apply."""
    bound = _bind_scalars(args)
    leaves = pytree.tree_leaves([arg for arg in bound if isinstance(arg, tuple | list)])
    if kwargs.get("mutated_arg_indices") or not all(isinstance(x, torch.Tensor) for x in leaves):
        return in_python(*args, **kwargs)
    try:
        return rule(*bound)
    except jax.errors.ConcretizationTypeError:
        return in_python(*args, **kwargs)


def _bind_scalars(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with Python scalars among the operands bound to the functions.

    There are some with dynamic shapes: once dynamo has seen two sizes, graphs take the size.
    """
    *before, last = args
    scalars = [None if isinstance(arg, torch.Tensor) else arg for arg in last]
    if not any(isinstance(arg, int | float) for arg in scalars):
        return args
    tensors = tuple(arg for arg in last if isinstance(arg, torch.Tensor))
    return (*(_Bound(arg, scalars) if callable(arg) else arg for arg in before), tensors)


class _Bound:
    """A function with some of its last arguments bound.

    Args:
        function: of all of them.
        scalars: its last arguments; None for those that are not bound.
    """

    def __init__(self, function: Callable[..., Any], scalars: Sequence[Any]):
        """See the class."""
        self.function, self.scalars = function, scalars

    def __call__(self, *args: Any) -> Any:
        """Call it with the others."""
        count = len(args) - sum(scalar is None for scalar in self.scalars)
        rest = iter(args[count:])
        last = (next(rest) if scalar is None else scalar for scalar in self.scalars)
        return self.function(*args[:count], *last)


# The rules


def _cond(predicate: Any, if_true: Any, if_false: Any, operands: Any) -> tuple[Any, ...]:
    if isinstance(predicate, bool):
        return (if_true if predicate else if_false)(*operands)
    inputs = _ours([predicate, *operands])

    def build(graphs: list[_Graph], arrays: Arrays, key: Any) -> Arrays:
        chosen, *rest = arrays
        branches = [functools.partial(graph.run, key=key) for graph in graphs]
        return jax.lax.cond(chosen.reshape(()), *branches, rest)

    avals = [tensor._aval for tensor in inputs[1:]]
    return tuple(_recorded("cond", [(if_true, avals), (if_false, avals)], inputs, build))


def _while(condition: Any, body: Any, carried: Any, additional: Any, *_: Any) -> tuple[Any, ...]:
    operands, count = _ours([*carried, *additional]), len(carried)

    def build(graphs: list[_Graph], arrays: Arrays, key: Any) -> Arrays:
        rest = arrays[count:]

        def cond(state: Any) -> Any:
            iteration, now = state
            return graphs[0].run([*now, *rest], _fold_in(key, iteration, 0))[0].reshape(())

        def step(state: Any) -> Any:
            iteration, now = state
            return iteration + 1, graphs[1].run([*now, *rest], _fold_in(key, iteration, 1))

        return jax.lax.while_loop(cond, step, (jnp.uint32(0), arrays[:count]))[1]

    avals = [tensor._aval for tensor in operands]
    graphs = [(condition, avals), (body, avals)]
    return tuple(_recorded("while_loop", graphs, operands, build, like=avals[:count]))


def _scan(step: Any, init: Any, xs: Any, additional: Any = ()) -> tuple[Any, ...]:
    return _stepped("scan", step, init, xs, additional)


def _map(step: Any, xs: Any, additional: Any = ()) -> tuple[Any, ...]:
    return _stepped("map", step, (), xs, additional)


def _stepped(name: str, step: Any, init: Any, xs: Any, additional: Any) -> tuple[Any, ...]:
    operands = _ours([*init, *xs, *additional])
    carries, slices = len(init), len(xs)
    length = xs[0].shape[0]
    avals = [tensor._aval for tensor in operands]
    for index in range(carries, carries + slices):
        meta = avals[index].meta
        avals[index] = Aval.contiguous(tuple(meta.size[1:]), meta.dtype)

    def build(graphs: list[_Graph], arrays: Arrays, key: Any) -> Arrays:
        rest = arrays[carries + slices :]

        def body(state: Any, now: Any) -> Any:
            iteration, carry = state
            out = graphs[0].run([*carry, *now, *rest], _fold_in(key, iteration, 0))
            return (iteration + 1, out[:carries]), out[carries:]

        xs_arrays = arrays[carries : carries + slices]
        (_, last), stacked = jax.lax.scan(
            body, (jnp.uint32(0), arrays[:carries]), xs_arrays, length
        )
        return [*last, *stacked]

    return tuple(_recorded(name, [(step, avals)], operands, build, stacks=(carries, length)))


def _ours(tensors: Sequence[Any]) -> list[Any]:
    return [import_tensor(torch.ops.aten.copy.default, tensor) for tensor in tensors]


def _fold_in(key: Any, *integers: Any) -> Any:
    """A key for each step and graph; None for None."""
    return None if key is None else functools.reduce(jax.random.fold_in, integers, key)


# Graphs


class _Graph:
    """A function of tensors, as one of arrays.

    Args:
        function: usually a graph that dynamo traced.
        avals: of the tensors that it takes.

    Attributes:
        results: the avals of what it returns, once it was traced.
        draws: whether it draws random numbers, likewise.
    """

    def __init__(self, function: Any, avals: Sequence[Aval]):
        """See the class."""
        self._function, self._avals = function, avals
        self._default = torch.get_default_dtype()  # as it is now, whenever the program is compiled
        self.results: list[Aval] = []
        self.draws = False

    def run(self, arrays: Sequence[Any], key: Any) -> Arrays:
        """What it returns for arrays."""
        tensors = [
            lazy_tensor.fresh(aval, Value.handed(array))
            for aval, array in zip(self._avals, arrays, strict=True)
        ]
        with tapes.immediately(self._keys(key)), torch.no_grad(), _default_dtype(self._default):
            results = pytree.tree_leaves(self._function(*tensors))
            if any(result is None for result in results):
                raise RuntimeError(f"{self._function} returned None where a tensor is needed")
            imported = _ours(results)
            values = [lazy_tensor.read(tensor) for tensor in imported]
        tapes.materialize([value for value in values if value.array is None])  # from around
        self.results = [Aval.contiguous(tuple(tensor.shape), tensor.dtype) for tensor in imported]
        arrays = [jnp.asarray(value.array) for value in values]
        return [
            jax.lax.convert_element_type(array, array.dtype) for array in arrays
        ]  # no weak types

    def _keys(self, key: Any) -> Iterator[Any]:
        for index in itertools.count():
            self.draws = True
            yield jax.random.key(0) if key is None else jax.random.fold_in(key, index)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _code(function: Any) -> str | None:
    """A key that is equal for graphs of the same code; None where it is not known."""
    if isinstance(function, _Bound):
        code = _code(function.function)
        return code and f"{code}\n{function.scalars}"
    if not isinstance(function, torch.fx.GraphModule):
        return None
    inner = dict(function.named_modules())
    codes: list[str | None] = [function.code]
    for node in function.graph.nodes:
        if node.op in ("get_attr", "call_module"):
            codes.append(_code(inner.get(str(node.target))))
    return None if None in codes else "\n".join(map(str, codes))


_RECIPES: Bounded[Any, tuple[Recipe, list[Aval]]] = Bounded(PROGRAMS, "control flow: graphs")


def _recorded(
    name: str,
    graphs: Sequence[tuple[Any, list[Aval]]],
    operands: Sequence[lazy_tensor.LazyTensor],
    build: Callable[[list[_Graph], Arrays, Any], Arrays],
    *,
    like: list[Aval] | None = None,
    stacks: tuple[int, int] | None = None,
) -> list[lazy_tensor.LazyTensor]:
    """Record one entry for an operator over graphs.

    Args:
        name: of the operator.
        graphs: functions, and the avals of the tensors that each takes.
        operands: the tensors that the operator takes.
        build: the results, of the graphs, the arrays of `operands`, and a key for random numbers.
        like: the avals of the results, where they are not those of the last graph.
        stacks: how many of the results are carries, and the length of the others' new first axis.
    """
    codes = tuple([_code(function) for function, _ in graphs])
    key = (name, codes, tuple([tensor._aval for tensor in operands]), stacks)
    key = (*key, torch.get_default_dtype())  # which the dtype of `i / 2` is, for integers i
    recorded = None if None in codes else _RECIPES.get(key)
    if recorded is None:
        recorded = _recipe(
            name, [_Graph(*graph) for graph in graphs], operands, build, like, stacks
        )
        if None not in codes:
            _RECIPES[key] = recorded
    recipe, outs = recorded
    values = tapes.recorder().record(recipe, [lazy_tensor.read(tensor) for tensor in operands])
    return [lazy_tensor.fresh(aval, value) for aval, value in zip(outs, values, strict=True)]


def _recipe(
    name: str,
    graphs: list[_Graph],
    operands: Sequence[lazy_tensor.LazyTensor],
    build: Callable[[list[_Graph], Arrays, Any], Arrays],
    like: list[Aval] | None,
    stacks: tuple[int, int] | None,
) -> tuple[Recipe, list[Aval]]:
    run: Any = torch.compiler.disable(lambda arrays, _, key: build(graphs, arrays, key))
    shapes = [jax.ShapeDtypeStruct(*tensor._aval.token) for tensor in operands]
    with logged_to(None), jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        jax.eval_shape(lambda arrays: run(arrays, (), None), shapes)
    outs = graphs[-1].results
    if like is not None:
        _check_carries(name, like, outs)
        outs = [Aval.contiguous(tuple(aval.meta.size), aval.meta.dtype) for aval in like]
    if stacks is not None:
        carries, length = stacks
        outs = [
            aval if index < carries else Aval.contiguous((length, *aval.meta.size), aval.meta.dtype)
            for index, aval in enumerate(outs)
        ]
    draws = any(graph.draws for graph in graphs)
    return Recipe(f"torch.{name}", run, len(outs), random=draws), outs


def _check_carries(name: str, want: list[Aval], got: list[Aval]) -> None:
    for index, (before, after) in enumerate(zip(want, got, strict=True)):
        if before.token != after.token or before.meta.dtype != after.meta.dtype:
            raise RuntimeError(
                f"{name} must keep the shapes and dtypes of the carry, and leaf {index} is "
                f"{tuple(before.meta.size)} {before.meta.dtype} before a step and "
                f"{tuple(after.meta.size)} {after.meta.dtype} after it"
            )


# dynamo, which torch imports when it first traces something


def _teach_dynamo() -> None:
    """Register with dynamo; an error must not break a program that only imports dynamo."""
    try:
        importlib.import_module("isoshard.torch_bridge.dynamo.dynamo_tensors").teach()
    except Exception as error:
        warnings.warn(
            f"torch.compile and torch.cond do not know tensors on the jax device: {error}",
            stacklevel=2,
        )
