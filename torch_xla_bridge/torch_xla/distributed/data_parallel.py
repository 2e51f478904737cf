"""One model per logical device, by torch_xla's name: here one, which a mesh spreads.

>>> import torch, isoshard.torch_bridge
>>> batches = [(torch.ones(2, 3), torch.zeros(2))] * 2
>>> def loop(model, loader, device, context):
...     return [(number, model(data).shape[0]) for number, (data, target) in loader]
>>> DataParallel(torch.nn.Linear(3, 1))(loop, batches)
[[(0, 2), (1, 2)]]

Mark the batch, or give `MpDeviceLoader` an `input_sharding`, to use every chip.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from isoshard.torch_bridge.kit import hardware, pytree
from isoshard.torch_xla_bridge.loading import ParallelLoader
from isoshard.torch_xla_bridge.session.replicas import needs_replicas

__all__ = ["Context", "DataParallel"]


class Context:
    """What a loop keeps from one call to the next.

    Args:
        device: that the loop runs on.
    """

    def __init__(self, device: torch.device):
        """See the class."""
        self.device = device

    def getattr_or(self, name: str, defval: Any) -> Any:
        """An attribute; made, where it is missing or None.

        Args:
            name: of the attribute.
            defval: its value then, or a function that makes it.
        """
        value = getattr(self, name, None)
        if value is None:
            value = defval() if callable(defval) else defval
            setattr(self, name, value)
        return value


class DataParallel:
    """Runs a loop with a model on the logical device.

    Args:
        network: a module, of which a copy is moved to the device; or a function that makes one.
        device_ids: the logical device, or nothing: then the module runs where it is.
        batchdim: axis along which batches are counted.

    Raises:
        RuntimeError: there are several device ids.
    """

    def __init__(
        self,
        network: torch.nn.Module | Callable[[], torch.nn.Module],
        device_ids: Sequence[Any] | None = None,
        batchdim: int = 0,
    ):
        """See the class."""
        ids = hardware.get_xla_supported_devices() if device_ids is None else list(device_ids)
        if len(ids) > 1:
            raise RuntimeError(needs_replicas(f"DataParallel over {list(map(str, ids))}"))
        module = network if isinstance(network, torch.nn.Module) else network()
        self._batchdim = batchdim
        self._moves = bool(ids)
        if ids:
            module = copy.deepcopy(module).to(torch.device(ids[0]))
        else:
            ids = [next((str(parameter.device) for parameter in module.parameters()), "cpu")]
        self._devices, self._models = ids, [module]
        self._context = Context(torch.device(ids[0]))

    @property
    def devices(self) -> list[Any]:
        """The device, in a list."""
        return self._devices

    @property
    def models(self) -> list[torch.nn.Module]:
        """The module on it, in a list."""
        return self._models

    def __call__(
        self,
        loop_fn: Callable[..., Any],
        loader: Iterable[Any],
        fixed_batch_size: bool = False,
        batches_per_execution: int = 1,
    ) -> list[Any]:
        """Run a loop.

        Args:
            loop_fn: called with the module, an iterator of `(number, batch)`, the device, and a
                `Context`.
            loader: of batches on the CPU, which are brought to the device in the background.
            fixed_batch_size: end at the first batch of another size than the first.
            batches_per_execution: how many batches there are between two executions.

        Returns:
            What the loop returns, in a list.
        """
        batches = self._fixed(loader) if fixed_batch_size else loader
        device = torch.device(self._devices[0])
        if not self._moves:
            return [loop_fn(self._models[0], enumerate(batches), device, self._context)]
        parallel = ParallelLoader(
            batches,
            [device],
            batchdim=self._batchdim,
            batches_per_execution=batches_per_execution,
        )
        try:
            numbered = enumerate(parallel.per_device_loader(device))
            return [loop_fn(self._models[0], numbered, device, self._context)]
        finally:
            parallel.close()

    def _fixed(self, loader: Iterable[Any]) -> Iterator[Any]:
        first = None
        for batch in loader:
            sizes = {
                leaf.shape[self._batchdim]
                for leaf in pytree.tree_leaves(batch)
                if isinstance(leaf, torch.Tensor)
            }
            first = sizes if first is None else first
            if sizes != first:
                return
            yield batch
