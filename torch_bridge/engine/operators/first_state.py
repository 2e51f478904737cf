"""Zeros in the shape of a parameter: the state that an optimizer's first step makes.

As an entry of the tape they would be part of the program, which in the second step has an input in
their place: one more program to compile. So they are an input from the first step on, brought from
the host as the parameters were.

>>> import torch, isoshard as iso, isoshard.torch_bridge as xs
>>> weight = torch.nn.Parameter(torch.ones(4, device="jax"))
>>> optimizer = torch.optim.Adam([weight])
>>> xs.sync()
>>> before = len(iso.metrics.compilations())
>>> for _ in range(3):
...     optimizer.zero_grad()
...     weight.square().sum().backward()
...     optimizer.step()
...     xs.sync()
>>> len(iso.metrics.compilations()) - before
1

In a step that is captured or traced they are entries: each replay makes them. So are the fifth ones
of a parameter: whoever makes zeros in every step has no state.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch

from isoshard.core.blocks.block_layout import BlockLayout
from isoshard.core.layout.offload import is_offloaded
from isoshard.core.runtime import metrics
from isoshard.torch_bridge.engine.recording.lazy_tensor import LazyTensor
from isoshard.torch_bridge.engine.recording.recorder import Recorder
from isoshard.torch_bridge.engine.recording.tape import Tape
from isoshard.torch_bridge.engine.values import sharding_ids
from isoshard.torch_bridge.engine.values.value import Aval, Storage, Value

NAME = "aten::zeros_like"


def zeros(here: Recorder, like: LazyTensor, aval: Aval) -> Value | None:
    """Zeros on the host, to be placed as a parameter is.

    Returns:
        The value; None where an entry is to make it.
    """
    is_parameter = isinstance(like, torch.nn.Parameter)
    if type(here) is not Tape or here.log is not None or not is_parameter:
        return None
    layout_id = like._storage.value.layout
    created = _NUM_CREATED.get(like._storage, 0)
    if created == _MAX_CREATED:
        return None
    if layout_id != sharding_ids.UNPLACED:
        layout = sharding_ids.layout(layout_id)
        if isinstance(layout, BlockLayout) or is_offloaded(layout):
            return None
    value = Value(np.zeros(aval.meta.size, aval.physical), layout_id)
    value.origin = metrics.user_location()
    _NUM_CREATED[like._storage] = created + 1
    return value


_MAX_CREATED = 4  # Adam has two, with amsgrad three
_NUM_CREATED: weakref.WeakKeyDictionary[Storage, int] = weakref.WeakKeyDictionary()
