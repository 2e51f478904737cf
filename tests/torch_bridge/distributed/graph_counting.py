"""What the tests of `torch.compile(.., fullgraph=True)` share: marks, numbers, graphs counted."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from isoshard.core.runtime.private_names import release
from isoshard.torch_bridge._torch_internals.dynamo_values import SINCE

ONE_GRAPH = release(torch.__version__) >= SINCE
"""Whether a mesh may be asked without an end of the graph."""

ASKS_A_MESH = pytest.mark.skipif(not ONE_GRAPH, reason="asking a mesh ends the graph here")
"""For tests of what more graphs than one refuse, or are not."""

MARKS = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::UserWarning:torch._dynamo"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]
BACKENDS = ("eager", "aot_eager", "isoshard")


def data(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def compiled(function, backend, **options):
    """The function in one graph, where torch can, and what counts the graphs."""
    counter = CompileCounterWithBackend(backend)
    options = {"fullgraph": ONE_GRAPH, **options}
    return torch.compile(function, backend=counter, **options), counter


def graphs_of(counter):
    """How many graphs there are; one where this torch cannot make one."""
    return counter.frame_count if ONE_GRAPH else 1


def elements(t):
    """All elements; of pieces, those of each device."""
    if t.sharding_spec == "{manual}":
        return torch.stack([shard.data for shard in t.detach().local_shards])
    return t.detach().cpu()
