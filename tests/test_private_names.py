"""Private names of other packages are in their tables, and nowhere else in the package."""

import ast
import importlib
import pkgutil
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import torch

from isoshard.core.installation import ANNEXES, HEART
from isoshard.core.runtime import _jax_internals
from isoshard.torch_bridge import _torch_internals
from isoshard.torch_bridge.generation import _transformers_internals
from isoshard.torch_bridge.trainers import _lightning_internals

from . import private_names
from .sources import parsed

ROOT = Path(__file__).resolve().parents[1]
ROOMS = (*HEART, *ANNEXES, "src/isoshard")
TABLES = {
    "core/runtime/_jax_internals/": _jax_internals,
    "torch_bridge/_torch_internals/": _torch_internals,
    "torch_bridge/generation/_transformers_internals.py": _transformers_internals,
    "torch_bridge/trainers/_lightning_internals.py": _lightning_internals,
}
ALONE = {
    "planner/programs/worker.py": "jax.experimental",
}
"""Files that run in interpreters without isoshard, and what they use of others for all that."""

ALLOWED = {
    "_fields": "a NamedTuple's, and public there",
    "_init_weights": "transformers' initializer of a model's layers, which models define",
    "_asdict": "a NamedTuple's, and public there",
    "_replace": "a NamedTuple's, and public there",
    "_distribute_module_applied": "the mark of our own distribute_module; torch's sets it too",
    "_wrap_overrides": "the mark of torch's fsdp.wrap on modules, given by users",
    "_xla_checkpointed_forward_original": "torch_xla's mark on modules, set by our checkpoint",
    "_nn_linear_forward_original": "torch_xla's mark on layers, set by our fsdp.utils",
}
"""Attributes that are neither ours nor private names of torch or JAX, with the reason."""

_OBJECTS = (
    torch.empty(0),
    torch.nn.Module(),
    torch.optim.SGD([torch.empty(0)]),
    torch.amp.GradScaler("cpu"),
    torch.Generator(),
    torch.ops.aten.add.Tensor,
    torch.autograd.Function,
    jnp.zeros(1),
    jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    jax.sharding.NamedSharding,
    jax.sharding.Mesh,
)
THEIRS = {name for one in _OBJECTS for name in dir(one) if private_names.is_private(name)} - {
    "_name",  # of a file's planner, and of operators
}
"""What objects of torch and JAX have: theirs, though a class of ours may have it as well."""


@pytest.fixture(scope="module")
def sources():
    """The source of each file of the package."""
    paths = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]
    with parsed(paths) as trees:
        yield {str(path.relative_to(ROOT)): tree for path, tree in trees.items()}


@pytest.fixture(scope="module")
def rows():
    for table in TABLES.values():
        for module in pkgutil.iter_modules(getattr(table, "__path__", ())):
            importlib.import_module(f"{table.__name__}.{module.name}")
    return [row for table in TABLES.values() for row in table.NAMES]


@pytest.fixture(scope="module")
def search(rows, sources):
    ours = private_names.defined(sources.values()) | set(ALLOWED)
    stated = {row.attribute for row in rows if row.attribute[0] == "_"}
    return private_names.Search(ours, stated | THEIRS, {row.path for row in rows})


def test_no_module_but_the_tables_uses_one(search, sources):
    wrong = [
        f"{path}:{line}: {name}"
        for path, tree in sources.items()
        if not path.startswith(tuple(TABLES))
        for line, name in search.found(tree)
        if not (path in ALONE and name.startswith(ALONE[path]))
    ]
    assert not wrong, (
        f"private names of others belong in a table ({', '.join(TABLES)}):\n" + "\n".join(wrong)
    )


def test_what_is_allowed_is_used(sources):
    texts = [path.read_text() for path in map(ROOT.joinpath, sources)]
    assert [name for name in ALLOWED if not any(name in text for text in texts)] == []


def test_the_tables_use_what_they_state(rows, sources):
    """And state what they use: each private name in them is a row, or part of its path."""
    stated = {part for row in rows for part in row.path.split(".")}
    everything = private_names.Search(set(), set())
    for path, tree in sources.items():
        if not path.startswith(tuple(TABLES)):
            continue
        for line, name in everything.found(tree):
            used = {part for part in name.split(".") if private_names.is_private(part)}
            own = private_names.defined([tree]) | {
                table.__name__.rpartition(".")[2] for table in TABLES.values()
            }
            assert used <= stated | own, f"{path}:{line}: {name} has no row"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from torch._ops import OpOverload", ["torch._ops.OpOverload"]),
        ("def f():\n    from jax._src import config", ["jax._src.config"]),
        ("import torch._dynamo.utils as u", ["torch._dynamo.utils"]),
        ("import torch\ntorch._C._nn._parse_to()", ["torch._C", "torch._C._nn", "torch._C._nn._p"]),
        ("import torch\nC = torch._C", ["torch._C"]),
        ("from torch.optim.optimizer import _foreach", ["torch.optim.optimizer._foreach"]),
        ("from torch.fx.experimental import proxy_tensor", ["torch.fx.experimental.proxy_tensor"]),
        ("import torch\ndef f(m: torch.nn.Module):\n    m._hooks", ["m._hooks"]),
        ("from jax.core import Tracer", ["jax.core.Tracer"]),
        ("import jax\njax.core.Tracer", ["jax.core", "jax.core.Tracer"]),
        ("from jax.interpreters import mlir", ["jax.interpreters.mlir"]),
        ("def f():\n    from jax.experimental import layout", ["jax.experimental.layout"]),
        ("from jax import extend as e\ne.core", ["jax.extend", "jax.extend.core"]),
        ("import jax\njax.api_util, jax.lib", ["jax.api_util", "jax.lib"]),
        ("from jaxlib import xla_client", ["jaxlib.xla_client"]),
        ("import torch\ntorch.DispatchKey.CPU", ["torch.DispatchKey", "torch.DispatchKey.CPU"]),
        ("from torch.fx.node import has_side_effect", ["torch.fx.node.has_side_effect"]),
        ("import numpy as np\nnp._globals", ["numpy._globals"]),
        ("from flax.nnx import _x", ["flax.nnx._x"]),
        ("x.y._parameters", ["x.y._parameters"]),
        ("getattr(x, '_parameters')", ["getattr(x, '_parameters')"]),
        ("import operator\noperator.attrgetter('_theirs')", ["operator.attrgetter('_theirs')"]),
        ("import torch\nclass A(torch.nn.Module):\n    def f(self):\n        self._parameters",
         ["self._parameters"]),
        ("def _step(self: Any):\n    return self._scale", ["self._scale"]),
        ("class A:\n    def f(self):\n        return self._theirs", ["self._theirs"]),
        ("_ASKING = 'torch.distributed.tensor._api'", ["torch.distributed.tensor._api"]),
        ("class A:\n    def f(self):\n        self._parameters = 1", []),
        ("import torch\ntorch.ops.aten._to_copy", []),
        ("import torch\ntorch.nn.functional.relu, torch.nn.Linear", []),
        ("import jax\njax.numpy.linalg.norm, jax.tree_util.keystr, jax.P", []),
        ("from torch.nn.modules.module import register_module_forward_hook", []),
        ("import numpy as np\nnp.linalg.norm", []),
        ("import os\nos._exit(1)", []),
        ("x._ours, x.__dict__", []),
        ("from isoshard.core.runtime import _jax_internals", []),
        ('"""Like `torch._C` and so on."""', []),
    ],
)  # fmt: skip
def test_the_search_finds_them(source, found):
    search = private_names.Search(
        {"_ours", "_parameters", "_scale"}, {"_parameters", "_scale"}, {"torch.DispatchKey"}
    )
    got = [name for _, name in search.found(ast.parse(source))]
    assert len(got) == len(found)
    assert all(name.startswith(want) for name, want in zip(got, found, strict=True))
