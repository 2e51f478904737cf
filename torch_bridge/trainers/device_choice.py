"""The `jax` device in training libraries, and a warning if they choose the CPU.

The libraries are not imported here: each is changed when a program imports it.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any

from isoshard.core.errors import CodedWarning
from isoshard.core.runtime.private_names import PrivateName, optional
from isoshard.torch_bridge.common.after_import import after_import

from ._lightning_internals import FABRIC_CONNECTOR, TRAINER_CONNECTOR

_LIGHTNINGS = (
    ("lightning.pytorch", "lightning.fabric"),
    ("pytorch_lightning", "lightning_fabric"),
)


class DeviceChoiceWarning(CodedWarning, code="ISO060"):
    """A library has chosen the CPU although the `jax` device is available.

    Example:
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore", DeviceChoiceWarning)      # the CPU is meant
        ...     warn_cpu_chosen("Lightning", 'pass accelerator="jax"')
    """


def register() -> None:
    """Register the device with accelerate and Lightning, once they are imported.

    `import isoshard.torch_bridge` calls it.

    Example:
        >>> import isoshard.torch_bridge
        >>> from accelerate.state import PartialState
        >>> PartialState.default_device.fget.__module__
        'isoshard.torch_bridge.trainers.device_choice'
    """
    after_import("accelerate.state", _accelerate)
    for trainer, fabric in _LIGHTNINGS:
        connectors = (
            (f"{trainer}.trainer.connectors.accelerator_connector", TRAINER_CONNECTOR, trainer),
            (f"{fabric}.connector", FABRIC_CONNECTOR, fabric),
        )
        for module, connector, package in connectors:
            after_import(module, _Lightning(module, connector, package))


def warn_cpu_chosen(library: str, how_to_choose: str) -> None:
    """Warn that a library has chosen the CPU."""
    warnings.warn(
        f"{library} has chosen the CPU, although the jax device is available: {how_to_choose}",
        DeviceChoiceWarning,
        stacklevel=4,
    )


def _accelerate() -> None:
    state: Any = sys.modules["accelerate.state"].PartialState
    choose = state.default_device.fget

    def default_device(self: Any) -> Any:
        device = choose(self)
        if device.type == "cpu":
            warn_cpu_chosen(
                "accelerate",
                "set ACCELERATE_TORCH_DEVICE=jax in the environment, or choose the CPU explicitly "
                "by Accelerator(cpu=True), TrainingArguments(use_cpu=True) or "
                "ACCELERATE_TORCH_DEVICE=cpu",
            )
        return device

    state.default_device = property(default_device, doc=state.default_device.__doc__)


class _Lightning:
    """Registers the accelerator "jax" with one of Lightning's packages.

    Args:
        module: that has its connector.
        connector: the name of the connector.
        package: the package.
    """

    def __init__(self, module: str, connector: PrivateName, package: str):
        """See the class."""
        self._module, self._connector, self._package = module, connector, package

    def __call__(self) -> None:
        """Register it; called after the import of its connector."""
        lightning_device = importlib.import_module(
            "isoshard.torch_bridge.trainers.lightning_device"
        )
        accelerators = importlib.import_module(f"{self._package}.accelerators")
        with optional():  # Lightning's own import goes on
            lightning_device.register_accelerator(
                self._connector.of(sys.modules[self._module]), accelerators
            )
