"""Batches split over a mesh, and what happens after an import."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

import isoshard as iso
import isoshard.torch_bridge as xs
from isoshard import P
from isoshard.torch_bridge.common.after_import import after_import
from isoshard.torch_bridge.trainers.batches import batch_axes, split_batch, split_inputs


@pytest.fixture(scope="module")
def mesh():
    return iso.make_mesh((2, 4), ("data", "model"))


def test_rows_are_split_where_they_divide(mesh):
    batch = {
        "x": torch.ones(4, 3, device="jax"),
        "odd": torch.ones(5, device="jax"),
        "number": torch.ones((), device="jax"),
        "cpu": torch.ones(4),
        "laid": iso.shard(torch.ones(4, 4), mesh, P(None, "model")),
        "text": ["a", 3],
    }
    assert split_batch(batch, mesh, "data") is batch
    assert batch["x"].partition_spec == P("data")
    assert batch["odd"].partition_spec is None and batch["number"].partition_spec is None
    assert batch["laid"].partition_spec == P(None, "model")
    wide = torch.ones(8, device="jax")
    split_batch([wide], xs.Mesh(range(8), (2, 4), ("data", "model")), ("data", "model"))
    assert wide.partition_spec == P(("data", "model"))
    whole = torch.ones(8, device="jax")
    assert split_batch(whole, mesh, None).partition_spec is None


def test_axes_of_batches_are_checked_where_they_are_named(mesh):
    assert batch_axes(mesh, "data") == ("data",) and batch_axes(mesh, None) == ()
    assert batch_axes(mesh, ("data", "model")) == ("data", "model")
    assert batch_axes(iso.make_mesh((8,), ("model",)), "data") == ()
    with pytest.raises(iso.errors.SpecError, match="no mesh axis is called 'dta'"):
        batch_axes(mesh, "dta")


def test_what_a_module_is_called_with_is_split(mesh):
    seen = []

    class Module(torch.nn.Module):
        def forward(self, x, scale=None):
            seen.append((x.partition_spec, scale.partition_spec))
            return x * scale

    module = Module()
    hook = split_inputs(module, mesh, "data")
    module(torch.ones(4, device="jax"), scale=torch.ones(4, device="jax"))
    hook.remove()
    module(torch.ones(4, device="jax"), scale=torch.ones(4, device="jax"))
    assert seen == [(P("data"), P("data")), (None, None)]


def test_an_action_after_an_import(tmp_path, monkeypatch):
    (tmp_path / "imported_later.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    before = list(sys.meta_path)
    after_import("imported_later", lambda: seen.append(sys.modules["imported_later"].value))
    assert seen == []
    import imported_later

    assert seen == [3] and sys.meta_path == before
    assert type(imported_later.__spec__.loader).__module__ == "_frozen_importlib_external"
    after_import("imported_later", lambda: seen.append("again"))
    assert seen == [3, "again"]


def test_an_action_after_an_import_that_failed_at_first(tmp_path, monkeypatch):
    (tmp_path / "mended_later.py").write_text("import nowhere_at_all\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen = []
    before = list(sys.meta_path)
    after_import("mended_later", lambda: seen.append("there"))
    with pytest.raises(ModuleNotFoundError, match="nowhere_at_all"):
        importlib.import_module("mended_later")
    assert seen == []
    (tmp_path / "mended_later.py").write_text("value = 'longer than before'\n")
    importlib.invalidate_caches()
    importlib.import_module("mended_later")
    assert seen == ["there"] and sys.meta_path == before
