"""What isoshard uses of torch that has no public name: all of it, and nowhere else.

Each name is one row of a table (`isoshard.core.runtime.private_names`), with why it is used and
what happens in a torch without it. `docs/compatibility.md` is generated from the rows, and
`tests/torch_bridge/test_torch_internals.py` calls each as isoshard does. Operators
(`torch.ops.aten._to_copy`) are no rows: one that a torch does not have is left out.

| module | of |
|---|---|
| `dispatcher` | operators, dispatch keys, dispatch modes |
| `tensor_fields` | tensors, autograd's graph |
| `module_fields` | modules, gradient scalers |
| `device_slot` | the device, and lists of devices |
| `traced` | nested arguments, tracers |
| `control_flow` | `torch.cond`, `while_loop`, `scan`, `map` |
| `dynamo_hooks` | dynamo, which is not imported for it |
| `dtensor_fields` | `torch.distributed` |

>>> len({row.path for row in NAMES}) == len(list(NAMES)) > 30
True
"""

if __name__ != "isoshard.torch_bridge._torch_internals":
    raise ImportError(f"import isoshard.torch_bridge._torch_internals, not {__name__}")

from .declared import NAMES as NAMES
from .dispatcher import OpOverload as OpOverload
from .dispatcher import TorchDispatchMode as TorchDispatchMode
from .dispatcher import schema_of as schema_of
from .traced import pytree as pytree
