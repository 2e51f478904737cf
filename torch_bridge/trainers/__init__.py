"""Training libraries: their choice of the `jax` device, and models sharded by a `Plan` in them.

They choose their device themselves. accelerate, and with it `transformers.Trainer`, chooses `jax`
if the environment has `ACCELERATE_TORCH_DEVICE=jax`, Lightning with `accelerator="jax"`. Where the
`jax` device is available and one of them chooses the CPU, there is one warning.
"""

if __name__ != "isoshard.torch_bridge.trainers":
    raise ImportError(f"import isoshard.torch_bridge.trainers, not {__name__}")

from .device_choice import DeviceChoiceWarning, register

__all__ = ["DeviceChoiceWarning", "register"]
