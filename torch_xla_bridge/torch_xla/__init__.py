"""torch_xla's public modules, under the same names.

`import isoshard.torch_bridge.torch_xla as torch_xla`; or leave a script as it is, and run it with
`isoshard run-torch-xla script.py`.
"""

if __name__ != "isoshard.torch_xla_bridge.torch_xla":
    raise ImportError(f"import isoshard.torch_xla_bridge.torch_xla, not {__name__}")

from isoshard.torch_bridge.kit import modes as _modes
from isoshard.torch_bridge.kit import unplanned_steps as _unplanned_steps
from isoshard.torch_bridge.kit import xla_operators as _operators  # noqa: F401  (torch.ops.xla)
from isoshard.torch_xla_bridge.session.lazy_submodules import submodules

from .distributed import xla_backend as _xla_backend  # noqa: F401  (the `xla://` method of torch)
from .torch_xla import (
    compile,
    device,
    device_count,
    devices,
    launch,
    manual_seed,
    real_devices,
    step,
    sync,
)
from .version import __version__

__all__ = [
    "__version__",
    "compile",
    "device",
    "device_count",
    "devices",
    "launch",
    "manual_seed",
    "real_devices",
    "step",
    "sync",
]

if _modes.auto_spmd():
    _unplanned_steps.watch()

_submodule = submodules(
    __name__,
    (
        "_XLAC",
        "_dynamo",
        "_internal",
        "amp",
        "backends",
        "core",
        "debug",
        "distributed",
        "experimental",
        "runtime",
        "stablehlo",
        "test",
        "utils",
    ),
    {
        "save_as_stablehlo": "stablehlo",
        "save_torch_model_as_stablehlo": "stablehlo",
        "tpu": "_internal",
    },
)


def __getattr__(name: str) -> object:
    """A submodule, imported at first use; `xm` is that of `core`."""
    return _submodule("core").xla_model if name == "xm" else _submodule(name)
