"""Errors of weights: names and shapes that do not fit, damaged files.

>>> raise_listed("weights do not fit", ["a: shape (2,), not (3,)", "b: is not in like"])
Traceback (most recent call last):
    ...
isoshard.core.weights.weight_errors.WeightError: weights do not fit (2 errors):
  a: shape (2,), not (3,)
  b: is not in like
"""

from __future__ import annotations

from collections.abc import Sequence

from isoshard.core.errors import CodedError


class WeightError(CodedError, ValueError, code="ISO030"):
    """Weights of one model do not become those of the other by the rules given.

    Example:
        >>> import numpy as np
        >>> from isoshard.core.weights import Rule, WeightMap
        >>> WeightMap([Rule("up.weight", "up.kernel")]).apply({"down.weight": np.ones((4, 8))})
        Traceback (most recent call last):
            ...
        isoshard.core.weights.weight_errors.WeightError: the weights do not fit the rules (1 error):
          down.weight (4, 8): no rule takes it
    """


class FileFormatError(CodedError, ValueError, code="ISO031"):
    """A file of weights is damaged, or of another format than its name.

    Example:
        >>> import jax, pathlib
        >>> from isoshard.core.weights import load_safetensors
        >>> _ = pathlib.Path("cut.safetensors").write_bytes(b"short")
        >>> load_safetensors("cut.safetensors", jax.make_mesh((8,), ("x",)), ("x",))
        Traceback (most recent call last):
            ...
        isoshard.core.weights.weight_errors.FileFormatError: cut.safetensors: 5 bytes are no safetensors file, which has 8 more
    """  # noqa: E501


TRANSPOSED = (
    "the weight of a {kind} is (in, out, *window), and Flax's ConvTranspose slides the window the "
    "other way round: pass first=[Rule({weight}, {kernel}, TransposedKernel())], or with Kernel() "
    "for a Flax layer that has transpose_kernel=True"
)
"""What is wrong with the weight of a transposed convolution as the kernel of another one."""


def raise_listed(
    head: str, errors: Sequence[str], kind: type[ValueError] = WeightError, fix: str = ""
) -> None:
    """Raise all errors as one exception.

    Args:
        head: the head line.
        errors: one line each; may be empty.
        kind: of the error.
        fix: what to do, put last.

    Raises:
        ValueError: of class `kind`, if there are any.
    """
    if not errors:
        return
    count = f"{len(errors)} error{'s' * (len(errors) > 1)}"
    lines = [f"{head} ({count}):", *(f"  {error}" for error in errors)]
    raise kind("\n".join([*lines, *([fix] if fix else [])])) from None
