"""Libraries that train: what they learn of the device, and models laid out by a `Plan` in them.

They choose their device themselves. accelerate, and with it `transformers.Trainer`, takes ours
where the environment says `ACCELERATE_TORCH_DEVICE=jax`, Lightning with `accelerator="jax"`. Where
the `jax` device is there and one of them chooses the CPU, it is said once.
"""

if __name__ != "isoshard.torch_bridge.trainers":
    raise ImportError(f"import isoshard.torch_bridge.trainers, not {__name__}")

from .device_choice import DeviceChoiceWarning, register

__all__ = ["DeviceChoiceWarning", "register"]
