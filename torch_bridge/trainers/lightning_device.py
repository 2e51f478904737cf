"""Lightning's accelerator "jax", for `Trainer` and `Fabric`: one device, whatever its chips."""

from __future__ import annotations

from typing import Any

import torch

from ._lightning_internals import CHOOSE_ACCELERATOR, CHOOSE_STRATEGY, PRECISION
from .device_choice import warn_cpu_chosen


def register_accelerator(connector: Any, accelerators: Any) -> None:
    """Register the accelerator, and let a connector that has chosen it put tensors there.

    Raises:
        PrivateNameError: the connector lacks a method that is replaced; nothing is.
    """
    choose = CHOOSE_STRATEGY.of(connector)
    auto = CHOOSE_ACCELERATOR.of(connector)
    precision = PRECISION.of(connector)
    accelerator = accelerator_of(accelerators.Accelerator)
    registry: Any = getattr(accelerators, "AcceleratorRegistry", None)
    if registry is None:
        registry = accelerators.ACCELERATOR_REGISTRY
    registry.register("jax", accelerator, description="isoshard's device", override=True)

    def choose_strategy(self: Any) -> Any:
        strategy = choose(self)
        if isinstance(self.accelerator, accelerator) and hasattr(strategy, "root_device"):
            return type(strategy)(device=torch.device("jax", 0))
        return strategy

    def init_precision(self: Any) -> Any:
        plugin = precision(self)
        if isinstance(self.accelerator, accelerator) and getattr(plugin, "device", None) == "cuda":
            plugin.device = "jax"
            if getattr(plugin, "scaler", None) is not None:
                plugin.scaler = torch.amp.GradScaler("jax")
        return plugin

    def choose_accelerator() -> str:
        name = auto()
        if name == "cpu":
            how = 'pass accelerator="jax", or "cpu" to choose the CPU explicitly'
            warn_cpu_chosen("Lightning", how)
        return name

    CHOOSE_STRATEGY.put(connector, choose_strategy)
    PRECISION.put(connector, init_precision)
    CHOOSE_ACCELERATOR.put(connector, staticmethod(choose_accelerator))


def accelerator_of(parent: Any) -> Any:
    """The accelerator as a subclass of one of Lightning's.

    Args:
        parent: Lightning's `Accelerator`, of `Trainer` or of `Fabric`.
    """

    class JaxAccelerator(parent):
        """The `jax` device."""

        def setup_device(self, device: torch.device) -> None:
            """Check that the device is `jax`."""
            if device.type != "jax":
                raise ValueError(f'accelerator="jax" trains on the jax device, not on {device}')

        def teardown(self) -> None:
            """Do nothing."""

        def get_device_stats(self, device: Any) -> dict[str, Any]:
            """The bytes in use, by JAX's count."""
            return dict(torch.accelerator.memory_stats())

        @staticmethod
        def parse_devices(devices: Any) -> int:
            """How many devices: one, which a mesh spreads over the chips."""
            if devices not in (1, "1", "auto", -1, "-1", [0]):
                raise ValueError(
                    f"devices={devices!r}: the jax device is one, whatever number of chips it has. "
                    "Leave it out, and shard the model over a mesh: isoshard.torch_bridge."
                    "trainers.lightning_plan.plan_strategy(mesh, plan)"
                )
            return 1

        @staticmethod
        def get_parallel_devices(devices: Any) -> list[torch.device]:
            """The device, in a list."""
            return [torch.device("jax", 0)]

        @staticmethod
        def auto_device_count() -> int:
            """One."""
            return 1

        @staticmethod
        def is_available() -> bool:
            """True: importing isoshard's bridge registers it."""
            return True

        @staticmethod
        def name() -> str:
            """The value for `accelerator=`."""
            return "jax"

    return JaxAccelerator
