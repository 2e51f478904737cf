"""`Op`: a value of a computation of XLA, with operators and methods, by torch_xla's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import torch

from isoshard.torch_bridge.kit import physical_dtype, to_numpy

from ._computations import Computation, Node, apply, parameter
from ._operations import AXES, DTYPES, FUNCTIONS, GROUPS, struct, written
from ._shapes import Builder, Shape


def _binary(name: str) -> Callable[[Op, Op], Op]:
    def method(self: Op, other: Op) -> Op:
        return mkop(name, (self.op, other.op))

    method.__doc__ = f"XLA's `{name}`."
    return method


def _unary(name: str) -> Callable[[Op], Op]:
    def method(self: Op) -> Op:
        return mkop(name, (self.op,))

    method.__doc__ = f"XLA's `{name}`."
    return method


def _with(name: str, *names: str, **defaults: Any) -> Callable[..., Op]:
    """A method whose arguments after `self` are the operation's, by position or name."""

    def method(self: Op, *args: Any, **kwargs: Any) -> Op:
        attributes = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        if len(args) > len(names):
            raise TypeError(f"{name} takes {', '.join(names)}")
        return mkop(name, (self.op,), **attributes)

    method.__doc__ = f"XLA's `{name}`, with {', '.join((*names, *defaults))}."
    return method


def _conv(*names: str) -> Callable[..., Op]:
    names = ("window_strides", *names)

    def method(self: Op, kernel: Op, *args: Any, **kwargs: Any) -> Op:
        return mkop("Conv", (self.op, kernel.op), **dict(zip(names, args, strict=False)), **kwargs)

    method.__doc__ = f"XLA's convolution with a kernel and {', '.join(names)}."
    return method


class Op:
    """A value of a computation; what is done with it is not computed, but built.

    Args:
        op: what makes it.
    """

    def __init__(self, op: Node):
        """See the class."""
        self.op = op

    def shape(self) -> Shape:
        """Its dtype and sizes."""
        return Shape(written(self.op.aval))

    def builder(self) -> Builder:
        """A builder, for functions that take one."""
        return Builder("computation")

    def build(self, name: str) -> Computation:
        """The computation that ends in this value.

        Args:
            name: of the computation.
        """
        return Computation(name, self.op)

    __add__, __sub__, __mul__ = _binary("Add"), _binary("Sub"), _binary("Mul")
    __matmul__, __truediv__, __pow__ = _binary("Dot"), _binary("Div"), _binary("Pow")
    __mod__, __and__, __or__, __xor__ = map(_binary, ("Rem", "And", "Or", "Xor"))
    __le__, __lt__, __ge__, __gt__ = map(_binary, ("Le", "Lt", "Ge", "Gt"))
    __lshift__, __rshift__ = _binary("ShiftLeft"), _binary("ShiftRight")
    __eq__, __ne__ = _binary("Eq"), _binary("Ne")
    __hash__ = None
    __neg__, __not__, __invert__ = _unary("Neg"), _unary("Not"), _unary("Not")

    max, min, atan2 = _binary("Max"), _binary("Min"), _binary("Atan2")
    acos, asin, atan, ceil = map(_unary, ("Acos", "Asin", "Atan", "Ceil"))
    cos, cosh, erf, erfc = map(_unary, ("Cos", "Cosh", "Erf", "Erfc"))
    erfinf, exp, expm1, floor = map(_unary, ("ErfInv", "Exp", "Expm1", "Floor"))
    log, log1p, sqrt, rsqrt = map(_unary, ("Log", "Log1p", "Sqrt", "Rsqrt"))
    real, imag, conj, clz = map(_unary, ("Real", "Imag", "Conj", "Clz"))
    sin, sinh, tan, tanh = map(_unary, ("Sin", "Sinh", "Tan", "Tanh"))

    reshape = _with("Reshape", "sizes", dimensions=None, inferred_dimension=None)
    broadcast = _with("Broadcast", "sizes")
    broadcast_in_dim = _with("BroadcastInDim", "sizes", "dimensions")
    slice_in_dim = _with("SliceInDim", "start_index", "limit_index", "dimno", "stride", stride=1)
    cast = _with("Convert", "to_type")
    bitcast = _with("BitcastConvert", "to_type")
    transpose = _with("Transpose", "permutation")
    get_tuple_element = _with("GetTupleElement", "index")
    get_dimension_size = _with("GetDimensionSize", "dimension")
    rev = _with("Rev", "dimensions")
    max_pool = _with(
        "MaxPool",
        "kernel_size",
        "stride",
        "batch_dimension",
        "feature_dimension",
        "spatial_dimensions",
        "padding",
    )
    conv = _conv(*GROUPS[:2], "padding", "precision_config")
    conv_with_general_padding = _conv("padding", *GROUPS)
    conv_with_general_dimensions = _conv(*AXES, "padding", *GROUPS)
    conv_general = _conv("padding", *AXES, *GROUPS)
    conv_general_dilated = _conv("padding", "lhs_dilation", "rhs_dilation", *AXES, *GROUPS)

    def slice(
        self, start_indices: Sequence[int], limit_indices: Sequence[int], strides: Any = None
    ) -> Op:
        """XLA's `Slice`."""
        steps = [1] * len(start_indices) if strides is None else strides
        return mkop(
            "Slice",
            (self.op,),
            start_indices=start_indices,
            limit_indices=limit_indices,
            strides=steps,
        )

    def dynamic_slice(self, start_indices: Sequence[Op], slice_sizes: Sequence[int]) -> Op:
        """XLA's `DynamicSlice`."""
        starts = [start.op for start in start_indices]
        return mkop("DynamicSlice", (self.op, *starts), slice_sizes=slice_sizes)

    def dynamic_update_slice(self, update: Op, start_indices: Sequence[Op]) -> Op:
        """XLA's `DynamicUpdateSlice`."""
        return mkop("DynamicUpdateSlice", (self.op, update.op, *(s.op for s in start_indices)))

    def pad(self, value: Op, config: Sequence[Sequence[int]]) -> Op:
        """XLA's `Pad`: for each axis how much before, behind, and between."""
        return mkop("Pad", (self.op, value.op), config=config)

    def reduce(self, init_value: Op, computation: Any, dimensions: Sequence[int]) -> Op:
        """XLA's `Reduce`, with a function of two numbers."""
        built = self._of_two("Reduce", computation)
        operands = (self.op, init_value.op)
        return mkop("Reduce", operands, computation=built, dimensions=dimensions)

    def reduce_all(self, init_value: Op, computation: Any) -> Op:
        """XLA's `ReduceAll`, with a function of two numbers."""
        built = self._of_two("ReduceAll", computation)
        return mkop("ReduceAll", (self.op, init_value.op), computation=built)

    def reduce_window(
        self,
        init_value: Op,
        computation: Any,
        window_dimensions: Sequence[int],
        window_strides: Sequence[int],
        padding: str = "valid",
    ) -> Op:
        """XLA's `ReduceWindow`, with a function of two numbers."""
        return mkop(
            "ReduceWindow",
            (self.op, init_value.op),
            computation=self._of_two("ReduceWindow", computation),
            window_dimensions=window_dimensions,
            window_strides=window_strides,
            padding=padding,
        )

    def _of_two(self, name: str, computation: Any) -> Computation:
        scalar = self.shape().as_scalar()
        return Op.make_computation(name, computation, (scalar, scalar))

    def select(self, true_value: Op, false_value: Op) -> Op:
        """XLA's `Select`."""
        return mkop("Select", (self.op, true_value.op, false_value.op))

    def triangualr_solve(
        self,
        b: Op,
        left_side: Any = None,
        lower: Any = None,
        unit_diagonal: Any = None,
        transpose_a: Any = None,
    ) -> Op:
        """XLA's `TriangularSolve`, under the name it has in torch_xla."""
        options = {"left_side": left_side, "lower": lower, "unit_diagonal": unit_diagonal}
        return mkop("TriangularSolve", (self.op, b.op), **options, transpose_a=transpose_a)

    def clamp(self, min_value: Op, max_value: Op) -> Op:
        """XLA's `Clamp`."""
        return mkop("Clamp", (self.op, min_value.op, max_value.op))

    def conditional(
        self, true_operand: Op, false_operand: Op, true_computation: Any, false_computation: Any
    ) -> Op:
        """XLA's `Conditional`: this value chooses between two functions of an operand."""
        return mkop(
            "Conditional",
            (self.op, true_operand.op, false_operand.op),
            true_computation=Op.make_computation("True", true_computation, (true_operand,)),
            false_computation=Op.make_computation("False", false_computation, (false_operand,)),
        )

    def mkconditional(self, ops: Sequence[Op], true_fn: Any, false_fn: Any, **kwargs: Any) -> Op:
        """A conditional over the same values in both branches."""
        values = Op.tuple(ops)
        return self.conditional(values, values, true_fn, false_fn)

    def while_loop(self, condition_computation: Any, body_computation: Any) -> Op:
        """XLA's `While`: this value is the first state."""
        return mkop(
            "While",
            (self.op,),
            condition_computation=Op.make_computation("Condition", condition_computation, (self,)),
            body_computation=Op.make_computation("Body", body_computation, (self,)),
        )

    @classmethod
    def mkwhile(cls, ops: Sequence[Op], condition_fn: Any, body_fn: Any, **kwargs: Any) -> Op:
        """A loop over several values."""
        return Op.tuple(ops).while_loop(condition_fn, body_fn)

    @classmethod
    def make_computation(
        cls, name: str, computation: Any, args_or_shapes: Sequence[Any], **kwargs: Any
    ) -> Computation:
        """A computation of a function of values, if it is none yet."""
        if isinstance(computation, Computation):
            return computation
        shapes = [arg if isinstance(arg, Shape) else arg.shape() for arg in args_or_shapes]
        return create_computation(name, Op.wrap_function(computation), shapes, **kwargs)

    @classmethod
    def wrap_function(cls, fn: Callable[..., Any]) -> Callable[..., Any]:
        """A function of values, for one of a tuple; its results become a tuple."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if len(args) == 1 and args[0].shape().is_tuple():
                count = args[0].shape().tuple_size()
                args = tuple(args[0].get_tuple_element(index) for index in range(count))
            result = fn(*args, **kwargs)
            return Op.tuple(result) if isinstance(result, tuple | list) else result

        return wrapper

    def scalar_like(self, value: Any) -> Op:
        """A number for each element, of the same dtype."""
        shape = self.shape()
        return Op.scalar(self.builder(), value, dtype=shape.dtype).broadcast(shape.sizes)

    def zeros_like(self) -> Op:
        """Zeros of the same shape and dtype."""
        return self.scalar_like(0)

    def ones_like(self) -> Op:
        """Ones of the same shape and dtype."""
        return self.scalar_like(1)

    @classmethod
    def tuple(cls, ops: Sequence[Op], builder: Any = None) -> Op:
        """XLA's `Tuple`."""
        return mkop("Tuple", [op.op for op in ops])

    @classmethod
    def concat_in_dim(cls, ops: Sequence[Op], dimension: int, builder: Any = None) -> Op:
        """XLA's `ConcatInDim`."""
        return mkop("ConcatInDim", [op.op for op in ops], dimension=dimension)

    @classmethod
    def call(cls, computation: Any, ops: Sequence[Op], builder: Any = None) -> Op:
        """What a computation makes of values."""
        built = Op.make_computation("Call", computation, ops)
        return mkop("Call", [operand.op for operand in ops], computation=built)

    @classmethod
    def constant(cls, builder: Any, value: torch.Tensor) -> Op:
        """A constant; its value is a CPU tensor."""
        array = to_numpy(value.detach().cpu())
        dtype = physical_dtype(value.dtype)
        return Op(apply(lambda: jnp.asarray(array, dtype)))

    @classmethod
    def scalar(cls, builder: Any, value: Any, dtype: str | None = None) -> Op:
        """A number."""
        return cls.constant(builder, torch.tensor(value, dtype=cls.to_torch_type(dtype)))

    @classmethod
    def zero(cls, builder: Any, dtype: str | None = None) -> Op:
        """The number 0."""
        return cls.scalar(builder, 0, dtype)

    @classmethod
    def one(cls, builder: Any, dtype: str | None = None) -> Op:
        """The number 1."""
        return cls.scalar(builder, 1, dtype)

    @classmethod
    def iota(cls, builder: Any, shape: Shape, iota_dimension: int) -> Op:
        """XLA's `Iota`."""
        return mkleaf("Iota", builder, shape=shape.shape, iota_dimension=iota_dimension)

    @classmethod
    def sort(
        cls, ops: Sequence[Op], comparator: Any, dimension: Any = None, is_stable: Any = None
    ) -> Op:
        """XLA's `Sort`, in time and memory of the square of the size.

        Args:
            ops: values of one shape, sorted together.
            comparator: a computation of two numbers of each: whether the first comes before.
            dimension: the axis; the last by default.
            is_stable: it always is.
        """
        nodes = [op.op for op in ops]
        return mkop("Sort", nodes, comparator=comparator, dimension=dimension)

    @classmethod
    def map(
        cls, ops: Sequence[Op], computation: Any, dimensions: Any, static_operands: Any = ()
    ) -> Op:
        """XLA's `Map`: a computation of numbers, for each element."""
        return mkop("Map", [op.op for op in (*ops, *static_operands)], computation=computation)

    @classmethod
    def to_torch_type(cls, dtype: str | None) -> torch.dtype:
        """The torch dtype of XLA's name; float32 of None."""
        return getattr(torch, DTYPES[dtype]) if dtype else torch.float32


def mkop(name: str, ops: Sequence[Node], **kwargs: Any) -> Op:
    """A value that an operation of XLA makes.

    Args:
        name: of the operation.
        ops: the `.op` of its operands.
        **kwargs: its arguments.

    Raises:
        ValueError: there is no such operation here.
    """
    if name not in FUNCTIONS:
        raise ValueError(
            f"{name!r} is none of the builder's operations here; write it in JAX, and call it with "
            "torch_xla.core.xla_builder.call_jax"
        )
    kwargs.pop("builder", None)
    function = FUNCTIONS[name]
    return Op(apply(lambda *arrays: function(*arrays, **kwargs), *ops))


def mkleaf(name: str, builder: Any, **kwargs: Any) -> Op:
    """A value that an operation without operands makes; see `mkop`."""
    if name == "Constant":
        return Op.constant(builder, kwargs["value"])
    return mkop(name, (), **kwargs)


def mkparam(builder: Builder, param_no: int, shape: Shape) -> Op:
    """An argument of a computation.

    Args:
        builder: of the computation.
        param_no: its place.
        shape: of the argument.
    """
    return Op(parameter(param_no, struct(shape.shape)))


def create_computation(
    name: str, fn: Callable[..., Op], shapes: Sequence[Shape], **kwargs: Any
) -> Computation:
    """The computation that a function of values builds.

    Args:
        name: of the computation.
        fn: of one `Op` for each shape, and of `kwargs`.
        shapes: of its arguments.
        **kwargs: for `fn`.
    """
    builder = Builder(name)
    params = [mkparam(builder, index, shape) for index, shape in enumerate(shapes)]
    return Computation(name, fn(*params, **kwargs).op, len(params))
