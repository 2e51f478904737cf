"""Marks of tests of what an older torch lacks."""

import pytest
import torch

from isoshard.core.runtime.private_names import release


def _has_derivative(name: str) -> bool:
    result = getattr(torch, name)(torch.ones(1, requires_grad=True))
    return "NotImplemented" not in result[0].grad_fn.name()


def has(*operators: str) -> pytest.MarkDecorator:
    """Skip the test where torch lacks one of the operators.

    Args:
        operators: names in `torch.ops.aten`.
    """
    missing = [name for name in operators if not hasattr(torch.ops.aten, name)]
    return pytest.mark.skipif(bool(missing), reason=f"torch {torch.__version__} has no {missing}")


BEFORE_2_13 = release(torch.__version__) < (2, 13)

BEFORE_2_11 = release(torch.__version__) < (2, 11)

INDEXING = pytest.mark.skipif(BEFORE_2_11, reason="its vmap takes an index for a number on the CPU")
LDEXP = pytest.mark.skipif(BEFORE_2_11, reason="its CPU takes ldexp by bools")
AMINMAX = pytest.mark.skipif(not _has_derivative("aminmax"), reason="aminmax has no derivative")
