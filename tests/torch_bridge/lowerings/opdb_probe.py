"""Compare lowerings with CPU torch on every call that torch's own operator database makes.

    python tests/torch_bridge/lowerings/opdb_probe.py [family or operator prefix ...] [options]

`opdb_probe.py reduce` checks one family, `opdb_probe.py index_put aten::cat` the operators whose
names begin so, no argument all. The samples of `torch.testing` run on the CPU, forward and
backward; a dispatch mode sees each functional aten call and, where the table has a lowering,
computes it again with JAX. What differs is printed per aten overload, with the arguments of the
first and the last case. `torch.testing` needs the package `expecttest`.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import sys
import unittest.mock
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import jax
import numpy as np
import torch
from harness import to_array
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

from isoshard.torch_bridge import lowerings
from isoshard.torch_bridge.engine.signatures.bound_op import build_call
from isoshard.torch_bridge.engine.signatures.shape_inference import infer
from isoshard.torch_bridge.engine.values.metas import Lift, Meta, Slot, map_leaves
from isoshard.torch_bridge.lowerings import registry

# Results that torch leaves open: uninitialised memory, places among equal elements.
_NO_VALUES = ("aten::empty", "aten::new_empty", "aten::resize", "aten::_efficientzerotensor")
_FIRST_RESULT = ("sort", "topk", "kthvalue", "median", "nanmedian", "mode", "argsort")
_TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 2e-3}


def main() -> int:
    """Run the probe; the exit code is 1 when anything differs."""
    options = _options()
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002  (torch.testing draws from it)
    warnings.simplefilter("ignore")
    probe = Probe(_wanted(options.what), options.cases)
    for info in op_db:
        if options.op and not info.name.startswith(options.op):
            continue
        for dtype in (getattr(torch, name) for name in options.dtypes.split(",")):
            if dtype in info.dtypes:
                _run(info, dtype, probe, options.samples)
    probe.report()
    return 1 if probe.faults else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", help="families or beginnings of operator names")
    parser.add_argument("--op", help="only entries of the database whose name begins so")
    parser.add_argument("--dtypes", default="float32,int64,bool")
    parser.add_argument("--cases", type=int, default=12, help="calls checked per overload, dtype")
    parser.add_argument("--samples", type=int, default=40, help="samples per entry, dtype")
    return parser.parse_args()


def _wanted(what: list[str]) -> frozenset[str]:
    """The names in the table that families and prefixes select."""
    selected: set[str] = set() if what else set(registry.names())
    for word in what:
        if word in lowerings._FAMILIES:
            module = importlib.import_module(f"{lowerings.__name__}.{word}")
            with unittest.mock.patch.object(registry, "_TABLE", {}):
                importlib.reload(module)
                selected |= set(registry.names())
        else:
            prefix = word if word.startswith("aten::") else f"aten::{word}"
            selected |= {name for name in registry.names() if name.startswith(prefix)}
    return frozenset(selected)


def _run(info, dtype, probe: Probe, limit: int) -> None:
    """Call one entry of the database, and its gradient, under the probe."""
    grad = dtype.is_floating_point and info.supports_autograd
    try:
        samples = info.sample_inputs("cpu", dtype, requires_grad=grad)
        for number, sample in enumerate(samples):
            if number >= limit:
                break
            with probe:
                out = info.op(sample.input, *sample.args, **sample.kwargs)
                if grad:
                    _backward(out)
    except Exception as error:  # the database's own failures are not ours
        print(f"# {info.name} {dtype}: {type(error).__name__} in torch: {str(error)[:100]}")


def _backward(out) -> None:
    leaves = [out] if isinstance(out, torch.Tensor) else torch.utils._pytree.tree_leaves(out)
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            leaf.abs().sum().backward(retain_graph=True)


class Probe(TorchDispatchMode):
    """Recomputes functional aten calls with their lowering and keeps what differs."""

    def __init__(self, wanted: frozenset[str], cases: int):
        """Check the overloads `wanted`, each at most `cases` times per dtype."""
        super().__init__()
        self.wanted = wanted
        self.cases = cases
        self.checked: collections.Counter = collections.Counter()
        self.seen: set = set()
        self.faults: dict[str, list[str]] = collections.defaultdict(list)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the call on the CPU, then compare."""
        kwargs = kwargs or {}
        if (
            func.name() not in self.wanted
            or not _plain(func, (args, kwargs))
            or not self._fresh(func, args, kwargs)
        ):
            return func(*args, **kwargs)
        before = map_leaves(_copy, tuple(args))
        out = func(*args, **kwargs)
        try:
            fault = compare(func, before, kwargs, out)
        except Exception as error:
            fault = f"{type(error).__name__}: {str(error).strip()[:300]}"
        if fault:
            described = f"{fault}\n      {_describe(before)} {_describe(kwargs)}"
            self.faults[func.name()].append(described)
        return out

    def _fresh(self, func, args, kwargs) -> bool:
        dtypes = [leaf.dtype for leaf in _leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        group = (func.name(), tuple(dtypes))
        described = (func.name(), _describe(args), _describe(kwargs))
        if described in self.seen or self.checked[group] >= self.cases:
            return False
        self.seen.add(described)
        self.checked[group] += 1
        return True

    def report(self) -> None:
        """Print the faults by overload, and what was never called."""
        for name, faults in sorted(self.faults.items()):
            print(f"{name}: {len(faults)} differ\n    {faults[0]}")
            if len(faults) > 1:
                print(f"    {faults[-1]}")
        called = {name for name, _ in self.checked}
        print(f"{sum(self.checked.values())} calls of {len(called)} overloads,", end=" ")
        print(f"{len(self.faults)} overloads differ")
        print("never called:", " ".join(sorted(self.wanted - called)))


def compare(func, args, kwargs, out) -> str | None:
    """What differs between `out` and the lowering's results, or None."""
    lowering = registry.find(func)
    got = _evaluate(func, lowering, args, kwargs)
    want = list(out) if isinstance(out, list | tuple) else [out]
    if lowering.random or func.name().startswith(_NO_VALUES):
        return None
    if func.name().split("::")[1].split(".")[0] in _FIRST_RESULT:
        got, want = got[:1], want[:1]
    if len(got) != len(want):
        return f"{len(got)} results, and torch has {len(want)}"
    for number, (have, wish) in enumerate(zip(got, want, strict=True)):
        if wish is not None and (fault := _difference(have, wish)):
            return f"result {number}: {fault}"
    return None


def _difference(have, wish) -> str | None:
    rtol = _TOLERANCE.get(wish.dtype, 2e-4)
    have, wish = np.asarray(have), np.asarray(to_array(wish.detach().resolve_conj().resolve_neg()))
    if have.dtype.name == "bfloat16":
        have, wish = have.astype("float32"), wish.astype("float32")
    exact = wish.dtype.kind not in "fc"
    try:
        np.testing.assert_allclose(have, wish, rtol=0 if exact else rtol, atol=0 if exact else rtol)
    except AssertionError as error:
        return " ".join(str(error).split())[:400]
    return None


def _evaluate(func, lowering, args, kwargs):
    tensors: list[torch.Tensor] = []
    scalars: list[float] = []

    def slot(leaf, lifted):
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            return Slot(len(tensors) - 1)
        if lifted and type(leaf) is float:
            scalars.append(leaf)
            return Lift(len(scalars) - 1)
        return leaf

    def bind(name, value):
        return map_leaves(lambda leaf: slot(leaf, name in lowering.lift), value)

    schema = [argument.name for argument in func._schema.arguments]
    args = tuple(bind(name, value) for name, value in zip(schema, args, strict=False))
    kwargs = {name: bind(name, value) for name, value in kwargs.items()}
    metas = tuple(Meta.of(t) for t in tensors)
    outs = infer(func, args, kwargs, metas, scalars)
    call = build_call(func, args, kwargs, metas, outs=outs)
    inputs = [to_array(t.detach().resolve_conj().resolve_neg()) for t in tensors]
    numbers = [jax.numpy.float32(s) for s in scalars]
    key = jax.random.key(0)
    return jax.jit(lambda inputs, numbers: call(inputs, numbers, key))(inputs, numbers)


def _plain(func, value) -> bool:
    """Whether the engine would come to a lowering with this call: dense, known dtypes, no mask."""
    tensors = [leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor)]
    masked = func.name() == "aten::index.Tensor" and any(t.dtype == torch.bool for t in tensors[1:])
    return not masked and all(
        t.layout == torch.strided and t.dtype not in (torch.complex32, torch.complex128)
        for t in tensors
    )


def _copy(leaf):
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _leaves(value):
    return torch.utils._pytree.tree_leaves(value)


def _describe(value) -> str:
    def word(leaf):
        if isinstance(leaf, torch.Tensor):
            return f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
        return repr(leaf)

    return str(torch.utils._pytree.tree_map(word, value)).replace("'", "")


if __name__ == "__main__":
    sys.exit(main())
