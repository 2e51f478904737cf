"""The name of the device: `jax:0`, or `xla:0` in scripts written for torch_xla.

>>> current()
device(type='jax', index=0)
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch

from isoshard.core.errors import DeviceError

OURS = ("jax", "lazy", "xla")
"""Device types that mean the `jax` device: its name, its C++ type, and torch_xla's name."""

_device: torch.device | None = None


def current() -> torch.device:
    """The device as tensors report it."""
    global _device
    if _device is None:
        _device = torch.device("jax", 0)
    return _device


def check_index(device: torch.device | str | None) -> None:
    """Raise for a device `jax` of another index; in scripts of torch_xla any `xla` is the device.

    Raises:
        DeviceError: its index is not 0.

    >>> check_index("jax:9")
    Traceback (most recent call last):
        ...
    isoshard.core.errors.DeviceError: there is no device jax:9: to torch all of JAX's devices are one device, jax:0; to shard a tensor over several, use iso.shard(tensor, mesh, spec)
    """  # noqa: E501
    device = torch.device(device) if isinstance(device, str) else device
    if device is not None and device.type == "jax" and device.index:
        raise DeviceError(
            f"there is no device {device}: to torch all of JAX's devices are one device, jax:0; to "
            "shard a tensor over several, use iso.shard(tensor, mesh, spec)"
        )


def is_torch_xla() -> bool:
    """Whether the script was written for torch_xla: its device is `xla`."""
    return current().type == "xla"


def reword(error: Exception) -> None:
    """Let an error of torch's C++ side name the device as its user does.

    Args:
        error: changed in place, where it names the C++ type of the tensors.

    >>> error = RuntimeError("found input tensor at lazy:0 and parameter tensor at cpu")
    >>> reword(error)
    >>> str(error)
    'found input tensor at jax:0 and parameter tensor at cpu'
    """
    if not error.args or not isinstance(error.args[0], str):
        return
    name = current().type
    text = re.sub(r"\blazy(?=:\d)|(?<=['(])lazy(?=[)'])", name, error.args[0])
    text = re.sub(r"\bLazy(\w+)Type\b", rf"torch.{name}.\1Tensor", text)
    error.args = (text, *error.args[1:])


@contextlib.contextmanager
def in_users_words() -> Iterator[None]:
    """Reword what is raised inside."""
    try:
        yield
    except RuntimeError as error:
        reword(error)
        raise


def moving() -> str:
    """The call that moves a tensor or module to the device, for messages.

    >>> moving()
    ".to('jax')"
    """
    return f".to({current().type!r})"


def use(name: str) -> None:
    """Report another name from now on.

    Args:
        name: `"jax"` or `"xla"`.
    """
    global _device
    _device = torch.device(name, 0)
