"""Private names that leave torch, JAX or another package cost a feature, and never the import.

Each name of the tables is hidden from isoshard, in a process that then imports all its modules and
uses them a little (`tests/hidden_names.py`). Such a process takes 3 to 4 seconds, so here 32 names
are hidden at once; `python -m tests.hidden_names`, which `make test-all` runs, hides each alone.
"""

from __future__ import annotations

import pytest

from . import hidden_names

PYPROJECT = (hidden_names.ROOT / "pyproject.toml").read_text()
AT_ONCE = 32
ROWS = hidden_names.rows()
NEEDED = [row for row in ROWS if hidden_names.is_needed(row)]
OTHERS = [row for row in ROWS if row not in NEEDED and row.path not in hidden_names.UNHIDDEN]
GROUPS = [NEEDED, *(OTHERS[i : i + AT_ONCE] for i in range(0, len(OTHERS), AT_ONCE))]


@pytest.fixture(scope="module")
def server():
    server = hidden_names.Server()
    yield server
    server.close()


def test_all_is_well_where_nothing_is_hidden(server):
    assert not hidden_names.faults(server.all_there, [])
    missing = set(server.all_there.missing.values())
    assert all(package in PYPROJECT for package in missing), "isoshard has no such dependency"
    assert set(server.all_there.rows) == {row.path for row in ROWS}


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: f"{group[0].path}..{group[-1].path}")
def test_a_name_that_is_gone_costs_a_feature(server, group):
    outcome = server.without(hidden_names.names_of(group))
    wrong = hidden_names.faults(outcome, group)
    assert not wrong, "\n".join(wrong)


def test_so_does_a_module_that_is_gone(server):
    modules = [name for name in hidden_names.modules(ROWS) if name.startswith(("jax.", "torch."))]
    inside = [row for row in ROWS if f"{row.path}.".startswith(tuple(f"{m}." for m in modules))]
    outcome = server.without(modules)
    wrong = hidden_names.faults(outcome, inside, module=True)
    assert len(inside) > 40 and not wrong, "\n".join(wrong)


PLANTED = {
    "torch._ops.OpOverload": "from torch._ops import OpOverload",
    "jax.core.Tracer": "import jax\nTRACED = (jax.core.Tracer, int)",
    "torch.Tensor._is_view": "import torch\nOURS = torch.Tensor._is_view",
    "torch.utils._foreach_utils": "import torch.utils._foreach_utils",
    "jax.interpreters.mlir.lower_fun": """
from isoshard.core.runtime._jax_internals.primitive_rules import lower_fun
LOWERED = lower_fun(abs, multiple_results=False)
""",
}


def test_a_module_that_needs_a_name_at_import_is_found(server):
    """One that is planted for each of these names fails, and one beside them does not."""
    planted = {f"isoshard.core.planted{i}": source for i, source in enumerate(PLANTED.values())}
    beside = {
        "isoshard.core.beside": "import torch._ops, jax.core\nNAMES = torch._ops.OpOverloadPacket"
    }
    outcome = server.without(list(PLANTED), planted | beside)
    assert set(outcome.failed) == set(planted)


def test_what_cannot_be_hidden_is_there_to_be_named():
    assert set(hidden_names.UNHIDDEN) < {row.path for row in ROWS}
