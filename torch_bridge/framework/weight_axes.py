"""Layers of torch whose `weight` has other axes than that of a Linear or Conv.

By name and shape it could be theirs, and a map of standard names would take it for such.

>>> other_axes(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ConvTranspose1d(2, 2, 3))).keys()
dict_keys(['1.weight'])
"""

from __future__ import annotations

import torch

from isoshard.core.weights.weight_errors import TRANSPOSED

NO_OPTIMIZER = (
    "the state of {} is no weights. Map what it keeps of each parameter as the parameter itself: "
    "names.apply({{name: optimizer.state[p]['exp_avg'] for name, p in model.named_parameters()}}, "
    "like=optax_state[0].mu), and 'exp_avg_sq' to .nu; the count is optimizer.state[p]['step']. "
    "Files and checkpoints of an optimizer are iso.save's"
)

_TRANSPOSED = (torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d)


def other_axes(module: torch.nn.Module) -> dict[str, str]:
    """Weights that would be wrong as the kernel of a Linear or Conv.

    Returns:
        By the name of the weight, what it is, and the rule that maps it.
    """
    reasons = {}
    for path, child in module.named_modules():
        name = f"{path}.weight" if path else "weight"
        reason = _reason(child, name)
        if reason is not None and isinstance(getattr(child, "weight", None), torch.Tensor):
            reasons[name] = reason
    return reasons


def _reason(layer: torch.nn.Module, name: str) -> str | None:
    kind = type(layer).__name__
    rule = f"first=[Rule({name!r}, <name of the kernel>"
    if isinstance(layer, _TRANSPOSED):
        return TRANSPOSED.format(kind=kind, weight=repr(name), kernel="<name of the kernel>")
    if isinstance(layer, torch.nn.Embedding | torch.nn.EmbeddingBag):
        return (
            f"the weight of an {kind} is (rows, features), and would be transposed as a kernel: "
            f"name the layer of Flax that has an `embedding`, or pass {rule})]"
        )
    if isinstance(layer, torch.nn.Bilinear):
        return (
            f"the weight of a {kind} is (out, in1, in2), which no Linear or Conv of Flax has: pass "
            f"{rule}, Transpose(<axes>))]"
        )
    if kind == "Conv1D" and type(layer).__module__.startswith("transformers."):
        return (
            "the weight of a Conv1D of transformers is (in, out), as Flax's kernels are, and would "
            f"be transposed: pass {rule})]"
        )
    return None
