"""What the tests of `torch.compile(.., fullgraph=True)` share: marks, numbers, graphs counted."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from isoshard.core.runtime.private_names import release
from isoshard.torch_bridge._torch_internals.dynamo_values import SINCE

MARKS = [
    pytest.mark.skipif(
        release(torch.__version__) < SINCE, reason="torch 2.13 brought what dynamo has to be taught"
    ),
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::UserWarning:torch._dynamo"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
BACKENDS = ("eager", "aot_eager", "isoshard")


def data(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def compiled(function, backend, **options):
    """The function in one graph, and what counts the graphs."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, backend=counter, fullgraph=True, **options), counter


def elements(t):
    """All elements; of pieces, those of each device."""
    if t.sharding_spec == "{manual}":
        return torch.stack([shard.data for shard in t.detach().local_shards])
    return t.detach().cpu()
