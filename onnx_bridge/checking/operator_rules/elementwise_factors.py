"""Operators that compute each element by itself, with broadcasting.

The proposal lists Max and Min among the unary ones and BitwiseNot among the others; what they do
decides here. ConstantOfShape, which it lists as unary, has a shape as its input: see `movement`.

The executor lowers each of these to primitives of `core.runtime.jaxprs.ELEMENTWISE` alone; a test
holds the two tables together.
"""

from __future__ import annotations

from isoshard.onnx_bridge.checking.factors import (
    EXTENSION,
    FORMALISM,
    Factors,
    Site,
    broadcast,
    named,
    rule,
)

UNARY = (
    "Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Cast Ceil Cos Cosh Dropout Erf Exp Floor "
    "Identity IsInf IsNaN Log Neg Not Reciprocal Round Sigmoid Sign Sin Sinh Tan Tanh"
).split()
UNARY_EXTENSIONS = (
    "Bernoulli CastLike Celu Clip Elu Gelu HardSigmoid HardSwish LeakyRelu Mish Relu Selu Shrink "
    "Softplus Softsign Sqrt Swish ThresholdedRelu RandomNormalLike RandomUniformLike"
).split()
BROADCAST = (
    "Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Equal Greater Less Max Min Mod Mul Or Pow "
    "Sub Sum Where Xor"
).split()
BROADCAST_EXTENSIONS = "Div GreaterOrEqual LessOrEqual Mean PRelu".split()


@rule(*UNARY, *UNARY_EXTENSIONS)
def unary(site: Site) -> Factors:
    """All outputs are sharded as the first input; the others are small, of any sharding."""
    axes = named("a", len(site.shape(0)))
    others = (None,) * (len(site.node.inputs) - 1)
    basis = FORMALISM if site.node.op_type in UNARY else EXTENSION
    return Factors((axes, *others), (axes,) * len(site.node.outputs), basis)


@rule(*BROADCAST, *BROADCAST_EXTENSIONS)
def n_ary(site: Site) -> Factors:
    """Axes are aligned from the right; one of size 1 goes with any split of the others."""
    shapes = [site.shape(index) for index in range(len(site.inputs))]
    inputs, output = broadcast(shapes)
    basis = FORMALISM if site.node.op_type in BROADCAST else EXTENSION
    return Factors(tuple(inputs), (output,), basis)
