"""Matrix products, which are a broadcast followed by a sum, and attention."""

from __future__ import annotations

from isoshard.onnx_bridge.checking.factors import (
    EXTENSION,
    FORMALISM,
    Axes,
    Factors,
    Site,
    Unfit,
    broadcast,
    named,
    rule,
)


@rule("MatMul", "MatMulInteger", "QLinearMatMul")
def matmul(site: Site) -> Factors:
    """(.., m, k) and (.., k, n) to (.., m, n); scales and zero points may have any sharding."""
    second = 3 if site.node.op_type == "QLinearMatMul" else 1
    a, b = site.shape(0), site.shape(second)
    if not a or not b:
        raise Unfit("it multiplies a single number")
    (batch_a, batch_b), batch = broadcast([a[:-2], b[:-2]], "batch")
    rows: Axes = ("m",) if len(a) > 1 else ()
    columns: Axes = ("n",) if len(b) > 1 else ()
    inputs: list[Axes | None] = [None] * len(site.node.inputs)
    inputs[0] = (*batch_a, *rows, "k")
    inputs[second] = (*batch_b, "k", *columns)
    return Factors(tuple(inputs), ((*batch, *rows, *columns),), FORMALISM)


@rule("Gemm")
def gemm(site: Site) -> Factors:
    """As MatMul, either side transposed by its attribute, and C broadcast to the result."""
    a = ("k", "m") if site.int_attribute("transA", 0) else ("m", "k")
    b = ("n", "k") if site.int_attribute("transB", 0) else ("k", "n")
    if not site.has(2):
        return Factors((a, b), (("m", "n"),), FORMALISM)
    return Factors((a, b, _against(site, 2, ("m", "n"))), (("m", "n"),), FORMALISM)


def _against(site: Site, index: int, axes: Axes) -> Axes:
    """The axes of an input that is broadcast to a result with `axes`."""
    shape, out = site.shape(index), site.result(0)
    if len(shape) > len(axes) or len(out) != len(axes):
        raise Unfit(f"its input {index} cannot be broadcast to its result")
    aligned, sizes = axes[len(axes) - len(shape) :], out[len(axes) - len(shape) :]
    return tuple(
        None if size == 1 and wide != 1 else factor
        for size, wide, factor in zip(shape, sizes, aligned, strict=True)
    )


@rule("Einsum")
def einsum(site: Site) -> Factors:
    """The letters are the factors; with dots or a repeated letter in one term there is no rule."""
    equation = str(site.node.attributes.get("equation", "")).replace(" ", "")
    terms, arrow, result = equation.partition("->")
    inputs = terms.split(",")
    if not arrow:
        letters = sorted(set(terms) - {","})
        result = "".join(letter for letter in letters if terms.count(letter) == 1)
    repeated = any(len(set(term)) < len(term) for term in (*inputs, result))
    if len(inputs) != len(site.inputs) or repeated or "." in equation:
        raise Unfit(f"there is no rule for its equation {equation[:80]!r}")
    return Factors(tuple(map(tuple, inputs)), (tuple(result),), FORMALISM)


@rule("Attention")
def attention(site: Site) -> Factors:
    """Batch and heads may be split; the softmax reduces over positions of keys."""
    ranks = [len(site.shape(index)) for index in range(3)]
    if set(ranks) not in ({3}, {4}) or len(site.node.outputs) > 1:
        raise Unfit("there is no rule for caches, or for q, k and v of different rank")
    extra = [None] * (len(site.node.inputs) - 3)
    if ranks[0] == 4:  # (batch, heads, length, width); with grouped heads q has more of them
        q = ("batch", "heads", "q", "width")
        k, v = ("batch", "heads", "kv", "width"), ("batch", "heads", "kv", "value")
        out = ("batch", "heads", "q", "value")
        heads = [site.shape(index)[1] for index in range(3)]
    else:  # (batch, length, heads x width)
        q, k, v = ("batch", "q", "heads"), ("batch", "kv", "heads"), ("batch", "kv", "heads")
        out = ("batch", "q", "heads")
        heads = [site.int_attribute("q_num_heads", 1), site.int_attribute("kv_num_heads", 1)]
    least = min((count for count in heads if isinstance(count, int)), default=1)
    return Factors((q, k, v, *extra), (out,), EXTENSION, limits={"heads": least})


@rule("RotaryEmbedding")
def rotary(site: Site) -> Factors:
    """As its first input; halves of a head change places."""
    axes = named("a", len(site.shape(0)))
    others = (None,) * (len(site.node.inputs) - 1)
    return Factors((axes, *others), (axes,), EXTENSION, unsplit=frozenset(axes[-1:]))
