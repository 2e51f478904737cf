import numpy as np
import pytest
from torch.nn import functional as F

from isoshard.core.domain.windows.transposed_conv import conv_transpose
from isoshard.core.errors import ShardingError
from isoshard.core.transfer.place import shard

from .against_torch import SPLITS, check

RNG = np.random.default_rng(0)
SPEC = ("x", None, "y")

# kernel, stride, padding, output padding, groups, dilation
KINDS = {
    "doubled": (4, 2, 1, 0, 1, 1),
    "output padding": (3, 2, 1, 1, 2, 1),
    "dilated": (3, 1, 0, 0, 1, 2),
    "stride beyond kernel": (1, 3, 0, 2, 1, 1),
    "cropped": (5, 3, 2, 0, 1, 1),
}


def both(stride=1, padding=0, output_padding=0, groups=1, dilation=1, **more):
    def ours(x, w, **layout):
        return conv_transpose(
            x,
            w,
            stride=stride,
            padding=padding,
            output_padding=output_padding,
            dilation=dilation,
            groups=groups,
            **more,
            **layout,
        )

    def theirs(x, w):
        function = {3: F.conv_transpose1d, 4: F.conv_transpose2d}[x.ndim]
        return function(x, w, None, stride, padding, output_padding, groups, dilation)

    return ours, theirs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", ["any", "empty"])
def test_uneven_shards(kind, split, mesh, x64):
    k, *rest = KINDS[kind]
    x, w = RNG.normal(size=(2, 4, 18)), RNG.normal(size=(4, 3, k))
    check(*both(*rest), x, (w,), 2, SPLITS[split], mesh, SPEC)


@pytest.mark.parametrize("method", ["auto", "windows"])
def test_even_shards_with_a_whole_axis_beside(method, mesh, x64):
    x, w = RNG.normal(size=(2, 2, 16, 4)), RNG.normal(size=(2, 2, 4, 3))
    ours, theirs = both((2, 1), (1, 2), method=method)
    out = check(ours, theirs, x, (w,), 2, SPLITS["even"], mesh, SPEC)
    assert out.shape == (2, 2, 32, 2)


def test_faults_are_told(mesh):
    x = shard(np.ones((2, 2, 16), np.float32), mesh, SPEC)
    with pytest.raises(ShardingError, match=r"kernel of shape \(3, 1, 3\) .*, and x has 2"):
        conv_transpose(x, np.ones((3, 1, 3), np.float32))
    with pytest.raises(ShardingError, match=r"output_padding \(1,\) is not less"):
        conv_transpose(x, np.ones((2, 1, 3), np.float32), output_padding=1)
