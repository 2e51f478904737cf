"""Presets: the names that torch's and Flax's standard layers give their weights.

| torch | Flax | operation |
|---|---|---|
| `weight` of a Linear or Conv | `kernel` | `Kernel` |
| `weight` of an Embedding | `embedding` | |
| `weight` of a norm | `scale` | |
| `bias` | `bias` | |
| `running_mean`, `running_var` of a BatchNorm | `mean`, `var` | |
| `num_batches_tracked` | | dropped |

>>> import jax
>>> import jax.numpy as jnp
>>> names = flax_names({"encoder.{i}": "layers.{i}"})
>>> like = {"layers": [{"kernel": jnp.zeros((4, 8)), "bias": jnp.zeros(8)}]}
>>> made = names.apply(
...     {"encoder.0.weight": jnp.ones((8, 4)), "encoder.0.bias": jnp.ones(8)}, like=like
... )
>>> jax.tree.map(jnp.shape, made)
{'layers': [{'bias': (8,), 'kernel': (4, 8)}]}

torch calls three things `weight`, so these maps read from `like` which is meant. Transposed
convolutions and packed formats are not among the standard names: put rules of your own for them
first. Where a torch module is given, its layers of other axes (`ConvTranspose2d`) raise; a plain
tree of arrays has no layers to look at.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .ops import Kernel, StandardKernel
from .reshaping import SplitAxis
from .weight_map import WeightMap
from .weight_rules import Rule

_LEAVES = (
    ("weight", "kernel", (StandardKernel(),), (2, 3, 4, 5)),
    ("weight", "embedding", (), (2,)),
    ("weight", "scale", (), (1,)),
    ("bias", "bias", (), None),
)
_STATISTICS = (("running_mean", "mean"), ("running_var", "var"))


def flax_names(
    modules: Mapping[str, str] | None = None,
    *,
    first: Sequence[Rule] = (),
    params: str = "",
    statistics: str = "",
) -> WeightMap:
    """Make the map from torch's standard names to those of Flax NNX.

    Args:
        modules: patterns of torch modules' paths with the paths in Flax; names below them are
            equal. The first match decides, so put special patterns first; other modules keep their
            path.
        first: rules that come before all others.
        params: what Flax puts before the names of parameters.
        statistics: what Flax puts before those of running statistics.

    Returns:
        The map. Weights of other names (`cls_token`) keep theirs.

    Raises:
        WeightError: a pattern cannot be used.

    Example:
        >>> import numpy as np
        >>> like = {"head": {"kernel": np.zeros((4, 8))}}
        >>> made = flax_names({"fc": "head"}).apply({"fc.weight": np.ones((8, 4))}, like=like)
        >>> made["head"]["kernel"].shape
        (4, 8)
    """
    rules = list(first)
    renamed = dict(modules or {})
    for ours, theirs in [*renamed.items(), *([] if "" in renamed else [("", "")])]:
        below = f"{ours}.{{rest*}}" if ours else "{rest*}"
        to = f"{theirs}.{{rest*}}" if theirs else "{rest*}"
        for name, became, ops, rank in _LEAVES:
            target = _join(params, to, became)
            rules.append(Rule(_join(below, name), target, *ops, rank=rank))
        for name, became in _STATISTICS:
            rules.append(Rule(_join(below, name), _join(statistics, to, became)))
        rules.append(Rule(_join(below, "{leaf}"), _join(params, to, "{leaf}")))
    rules.append(Rule("{rest*}.num_batches_tracked", None))
    for state in ("key", "count"):  # of nnx.Rngs
        rules.append(Rule(None, f"{{rest*}}.rngs.{{stream*}}.{state}"))
    return WeightMap(rules, by_target=True)


def linen_names(
    modules: Mapping[str, str] | None = None, *, first: Sequence[Rule] = ()
) -> WeightMap:
    """Make the map from torch's standard names to the variables of Flax Linen.

    Args:
        modules: as for `flax_names`; Linen calls layers `Dense_0`, or by their `name=`.
        first: as for `flax_names`.

    Returns:
        The map; parameters are below "params", running statistics below "batch_stats".

    Raises:
        WeightError: a pattern cannot be used.

    Example:
        >>> import numpy as np
        >>> like = {"params": {"Dense_0": {"kernel": np.zeros((4, 8))}}}
        >>> names = linen_names({"fc{i}": "Dense_{i}"})
        >>> names.apply({"fc0.weight": np.ones((8, 4))}, like=like)["params"]["Dense_0"].keys()
        dict_keys(['kernel'])
    """
    return flax_names(modules, first=first, params="params", statistics="batch_stats")


def attention(
    source: str,
    target: str,
    heads: int,
    *,
    names: Mapping[str, str] | None = None,
    out: tuple[str, str] = ("out_proj", "out"),
) -> list[Rule]:
    """Make the rules between projections with merged heads and Flax's MultiHeadAttention.

    Args:
        source: pattern of the torch module's path.
        target: of the Flax module's.
        heads: how many.
        names: torch's names of the projections into heads, and Flax's.
        out: torch's name of the projection out of them, and Flax's.

    Returns:
        Rules for `first=` of a preset.

    Raises:
        WeightError: a pattern cannot be used.

    Example:
        >>> rules = attention("h.{i}.attn", "blocks.{i}.attn", heads=4)
        >>> rules[0]
        Rule('h.{i}.attn.q_proj.weight', 'blocks.{i}.attn.query.kernel', Kernel(), SplitAxis(axis=1, into=(4, -1)))
    """  # noqa: E501
    names = names or {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
    rules = []
    for ours, theirs in names.items():
        split = SplitAxis(1, (heads, -1))
        weight, kernel = _join(source, ours, "weight"), _join(target, theirs, "kernel")
        rules.append(Rule(weight, kernel, Kernel(), split))
        bias = _join(target, theirs, "bias")
        rules.append(Rule(_join(source, ours, "bias"), bias, SplitAxis(0, (heads, -1))))
    ours, theirs = out
    merged = SplitAxis(0, (heads, -1))
    weight, kernel = _join(source, ours, "weight"), _join(target, theirs, "kernel")
    rules.append(Rule(weight, kernel, Kernel(), merged))
    rules.append(Rule(_join(source, ours, "bias"), _join(target, theirs, "bias")))
    return rules


def _join(*segments: str) -> str:
    return ".".join(segment for segment in segments if segment)
