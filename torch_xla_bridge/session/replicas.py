"""torch_xla's API of replicas, for SPMD scripts: there is one replica.

torch_xla's older mode runs one process (or thread) per chip, all with the same program: replicas.
An SPMD script is one replica, whatever its number of chips. So ordinals are 0, reductions over
replicas return their argument, and a call that needs a second replica raises.
"""

from __future__ import annotations

import io
import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import jax
import torch

from isoshard.torch_bridge.kit import hardware, runtime

from . import collectives, host_transfer

Device = str | torch.device


def xla_real_devices(devices: Sequence[Device] | None = None) -> list[str]:
    """The first chip of each logical device, such as `["CPU:0"]`.

    `torch_xla.real_devices()` lists every chip of this process.
    """
    requested = devices or hardware.get_xla_supported_devices()
    return [hardware.chip_names(hardware.chips_of(device)[:1])[0] for device in requested]


def xla_replication_devices(local_devices: Sequence[Device] | None = None) -> list[str]:
    """The chips that replicas would be on: the first one, as there is one replica."""
    if local_devices is not None and len(local_devices) > 1:
        raise RuntimeError(needs_replicas(f"replication over {list(map(str, local_devices))}"))
    return xla_real_devices(local_devices)


def set_replication(device: Device, devices: Sequence[Device] | None) -> None:
    """Check that the devices are one replica, as in an SPMD script."""
    xla_replication_devices(devices)


def needs_replicas(call: str) -> str:
    """The message of an error: a call that needs several replicas."""
    return (
        f"{call} needs several replicas, and isoshard runs SPMD scripts, which are one. Mark the "
        "batch with mark_sharding (or MpDeviceLoader's input_sharding) to use every chip."
    )


def get_local_ordinal() -> int:
    """The index of this replica on this machine: 0."""
    return 0


def get_ordinal() -> int:
    """The index of this replica: 0."""
    return 0


def is_master_ordinal(local: bool = True) -> bool:
    """Whether this process writes files and prints.

    Args:
        local: ask for this machine only: True. Otherwise only process 0 is the master.
    """
    return local or jax.process_index() == 0


def master_print(
    *args: Any, fd: TextIO | None = None, local: bool = False, flush: bool = False
) -> None:
    """Print, on the master only."""
    if is_master_ordinal(local):
        print(*args, file=sys.stdout if fd is None else fd, flush=flush)


def reduce_gradients(
    optimizer: torch.optim.Optimizer,
    groups: collectives.Groups = None,
    pin_layout: bool = True,
) -> None:
    """Add up the gradients of all replicas: nothing to do, there is one."""
    collectives.check_groups("reduce_gradients", groups)


def gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The gradients of an optimizer's parameters, of those that have one."""
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    barrier: bool = False,
    optimizer_args: dict[str, Any] | None = None,
    groups: collectives.Groups = None,
    pin_layout: bool = True,
) -> Any:
    """Make a step of an optimizer."""
    reduce_gradients(optimizer, groups, pin_layout)
    loss = optimizer.step(**(optimizer_args or {}))
    if barrier:
        runtime.sync()
    return loss


def save(
    data: Any, file_or_path: Any, master_only: bool = True, global_master: bool = False
) -> None:
    """`torch.save` of data moved to the CPU. An interrupted save leaves the old file as it was.

    Args:
        data: any nesting of tensors, containers and objects.
        file_or_path: a path, or an open binary file.
        master_only: only masters write.
        global_master: only process 0 is a master, not one process of each machine.
    """
    if not master_only or is_master_ordinal(local=not global_master):
        host_transfer.save(data, file_or_path)


def xla_rendezvous(
    payload: bytes = b"", ordinals: Sequence[int] | None = None, tag: str | None = None
) -> list[bytes]:
    """Wait for all replicas: there is one. Executes what was recorded.

    Other processes of an SPMD job are not waited for, as in torch_xla; that is what
    `torch.distributed.barrier()` of a gloo group does.
    """
    if ordinals is not None and len(ordinals) > 1:
        raise ValueError(needs_replicas(f"a rendezvous of {list(ordinals)}"))
    if not isinstance(payload, bytes):
        raise TypeError(f"the payload of a rendezvous is bytes, not {type(payload).__name__}")
    runtime.sync()
    return [payload]


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] = ()) -> list[bytes]:
    """The same as `xla_rendezvous`."""
    return xla_rendezvous(payload, replicas, tag)


def mesh_reduce(tag: str, data: Any, reduce_fn: Callable[[list[Any]], Any]) -> Any:
    """Reduce the data of every replica, on the CPU."""
    file = io.BytesIO()
    torch.save(host_transfer.to_cpu(data), file)
    payloads = rendezvous(tag, file.getvalue())
    return reduce_fn([torch.load(io.BytesIO(payload), weights_only=False) for payload in payloads])


def do_on_ordinals(
    target: Callable[..., Any], data: Any = (), ordinals: Sequence[int] | set[int] | int = (0,)
) -> Any:
    """Call a function on some replicas."""
    requested = {ordinals} if isinstance(ordinals, int) else set(ordinals)
    result = target(*host_transfer.to_cpu(data)) if 0 in requested else None
    rendezvous("do_on_ordinals")
    return result


def broadcast_master_param(model: torch.nn.Module) -> None:
    """Give all replicas the parameters of the master: there is one. Executes what was recorded."""
    collectives.collective_broadcast(list(itertools.chain(model.parameters(), model.buffers())))
    runtime.sync()
