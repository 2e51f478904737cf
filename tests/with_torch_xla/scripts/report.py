"""What the scripts print: one JSON line with losses, and the annotation of every marked tensor."""

import json

import torch_xla
import torch_xla.distributed.spmd as xs

annotations = {}


def mark(name, tensor, mesh, spec):
    """Annotate a tensor, and note how torch_xla prints it."""
    xs.mark_sharding(tensor, mesh, spec)
    note(name, tensor)


def note(name, tensor):
    """Note how torch_xla prints the annotation of a tensor."""
    annotations[name] = torch_xla._XLAC._get_xla_sharding_spec(tensor)


def finish(losses, parameters):
    """Print everything; parameters still have their annotation after the last step."""
    for name, parameter in parameters:
        if name in annotations:
            note(f"{name}, trained", parameter)
    found = {
        "torch_xla": torch_xla.__file__,
        "losses": [loss.item() for loss in losses],
        "annotations": annotations,
    }
    print(json.dumps(found), flush=True)
