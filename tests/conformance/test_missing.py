"""The list of operators without a lowering has what raises, and nothing that is computed."""

import pytest
import torch

from tests.conformance.missing import missing


def test_what_raises_is_listed_and_what_is_computed_is_not():
    names = missing()
    assert 0 < len(names) < 60
    assert "aten::_add_relu.Tensor" in names
    x = torch.ones(2, device="jax")
    with pytest.raises(NotImplementedError, match="has no JAX lowering"):
        torch.ops.aten._add_relu.Tensor(x, x)
    computed = {"aten::dist", "aten::cdist", "aten::add.Tensor", "aten::nonzero"}
    assert not computed & {*names}
