"""Anti-aliased resizing against CPU torch, smaller and larger, forward and backward."""

from __future__ import annotations

import pytest
import torch

from tests.torch_bridge.lowerings.harness import check

aten = torch.ops.aten
NAMES = [
    name for name in ("bilinear", "bicubic", "lanczos") if hasattr(aten, f"_upsample_{name}2d_aa")
]


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("output", [(3, 4), (12, 5)])
@pytest.mark.parametrize("name", NAMES)
def test_forward_and_backward(name, output, align_corners):
    forward = getattr(aten, f"_upsample_{name}2d_aa").default
    backward = getattr(aten, f"_upsample_{name}2d_aa_backward").default
    x = torch.randn(2, 3, 7, 9, generator=torch.Generator().manual_seed(0))
    check(forward, x, list(output), align_corners)
    grad = torch.randn(2, 3, *output, generator=torch.Generator().manual_seed(1))
    if name != "lanczos" or torch.cuda.is_available():
        check(backward, grad, list(output), [2, 3, 7, 9], align_corners)


def test_given_scales():
    x = torch.randn(1, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    check(aten._upsample_bilinear2d_aa.default, x, [3, 3], False, 0.4, 0.45)
