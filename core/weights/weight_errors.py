"""What is wrong with weights: names and shapes that do not fit, files that are not what they say.

>>> raise_listed("weights do not fit", ["a: shape (2,), wanted (3,)", "b: nothing is called so"])
Traceback (most recent call last):
    ...
isoshard.core.weights.weight_errors.WeightError: weights do not fit (2 faults):
  a: shape (2,), wanted (3,)
  b: nothing is called so
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
        isoshard.core.weights.weight_errors.WeightError: the weights do not fit the rules (1 fault):
          down.weight (4, 8): no rule takes it
    """


class FileFormatError(CodedError, ValueError, code="ISO031"):
    """A file of weights is damaged, or is not what its name says.

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
    what: str, faults: Sequence[str], kind: type[ValueError] = WeightError, fix: str = ""
) -> None:
    """Raise all faults as one error.

    Args:
        what: the head line.
        faults: one line each; may be empty.
        kind: of the error.
        fix: what to do, put last.

    Raises:
        ValueError: of class `kind`, if there are any.
    """
    if not faults:
        return
    count = f"{len(faults)} fault{'s' * (len(faults) > 1)}"
    lines = [f"{what} ({count}):", *(f"  {fault}" for fault in faults)]
    raise kind("\n".join([*lines, *([fix] if fix else [])])) from None
