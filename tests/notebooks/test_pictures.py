import dataclasses

import numpy as np
import pytest
import torch

import isoshard as iso
from examples.notebooks import pictures
from isoshard import P
from isoshard.planner.reports.findings import MemoryEstimate, TimeEstimate
from isoshard.planner.reports.report import Report


@pytest.fixture(scope="module")
def mesh():
    return iso.make_mesh((2, 4), ("data", "model"))


def boxes(axes):
    """Edges and label of each box: (left, top, right, bottom, devices)."""
    corners = [(*box.get_xy(), box.get_width(), box.get_height()) for box in axes.patches]
    texts = [text.get_text() for text in axes.texts]
    return [(x, y, x + w, y + h, text) for (x, y, w, h), text in zip(corners, texts, strict=True)]


@pytest.mark.parametrize("make", [np.float32, torch.tensor])
def test_boxes_end_where_shards_end(mesh, make):
    figure = pictures.borders(
        {
            "rows": iso.shard(make([[1.0] * 4] * 8), mesh, P("data")),
            "vector": iso.shard(make([1.0] * 8), mesh, P("model")),
        }
    )
    rows, vector = figure.axes
    assert boxes(rows) == [(0, 0, 4, 4, "0-3"), (0, 4, 4, 8, "4-7")]
    assert [box[4] for box in boxes(vector)] == ["0, 4", "1, 5", "2, 6", "3, 7"]
    assert [box[:4] for box in boxes(vector)][1] == (2, 0, 4, 1)
    assert rows.get_title() == "rows [8, 4]\nP('data',)"


def test_what_is_on_one_device_is_one_box():
    (axes,) = pictures.borders({"x": iso.to_jax(np.ones((2, 3), np.float32))}).axes
    assert boxes(axes) == [(0, 0, 3, 2, "0")]


@pytest.mark.parametrize("make", [np.float32, torch.tensor])
def test_boxes_of_unequal_blocks(mesh, make):
    sizes = (3, 0, 4, 1)
    array = iso.shard(make([[1.0] * 4] * 8), mesh, P("model"), uneven="pad", sizes=(sizes, None))
    (axes,) = pictures.borders({"rows": array}).axes
    assert [box[1::2] for box in boxes(axes)] == [(0, 3), (3, 3), (3, 7), (7, 8)]
    assert [box[4] for box in boxes(axes)] == ["0, 4", "1, 5", "2, 6", "3, 7"]
    assert axes.get_title() == "rows [8, 4]\nP('model',)"
    (axes,) = pictures.fields({"rows": array}).axes
    assert boxes(axes) == [
        (0, 0, 4, 3, "0, 4"),
        (0, 3, 4, 3, "1, 5"),
        (0, 3, 4, 7, "2, 6"),
        (0, 7, 4, 8, "3, 7"),
    ]
    assert [text.get_position() for text in axes.texts] == [(0, 3), (4, 3), (0, 7), (0, 8)]


def test_fields_are_drawn_whole(mesh):
    values = np.arange(-8, 24, dtype=np.float32).reshape(8, 4)
    (axes,) = pictures.fields({"u": iso.shard(values, mesh, P("data", "model"))}).axes
    (image,) = axes.images
    assert np.array_equal(image.get_array(), values)
    assert image.get_clim() == (-23, 23)
    assert len(axes.patches) == 8
    assert axes.get_title() == "u [8, 4]"


def test_bytes_of_each_device(mesh):
    arrays = [iso.shard(np.ones((8, 4), np.float32), mesh, spec) for spec in (P("data"), P())]
    assert pictures.bytes_by_device(arrays) == dict.fromkeys(range(8), 64 + 128)
    (axes,) = pictures.memory({"split": arrays[:1], "whole": arrays[1:]}).axes
    assert [bar.get_height() for bar in axes.patches] == [64 / 1024] * 8 + [128 / 1024] * 8


def test_curves_and_images():
    (axes,) = pictures.curves({"one": [3.0, 1.0], "other": [None, 2.0]}).axes
    assert axes.get_yscale() == "log"
    assert [text.get_text() for text in axes.get_legend().texts] == ["one", "other"]
    assert len(pictures.images({"a": np.eye(2), "b": np.eye(3)}).axes) == 2


def test_plans_are_bars_of_memory_and_seconds():
    gib = 1 << 30
    memory = MemoryEstimate(2 * gib, 0, 4 * gib, 0, 6 * gib, 12 * gib, "", (), 16 * gib)
    time = TimeEstimate(0.2, 0.1, 0.2, {"data": 0.05}, 0.25, 0.21, 0.6, "compute")
    one = Report("train", "jax", "trace", "v5e:4x4", {"data": 16}, "", memory, (), 4e13, 8e10, time)
    both = TimeEstimate(0.2, 0.1, 0.3, {"data": 0.05, "model": 0.1}, 0.45, 0.4, 0.6, "model")
    left, right = pictures.plans({"one": one, "two": dataclasses.replace(one, time=both)}).axes
    assert [bar.get_width() for bar in left.patches] == [2, 2, 4, 4, 6, 6]
    assert [bar.get_x() for bar in left.patches] == [0, 0, 2, 2, 6, 6]
    assert left.lines[0].get_xdata() == pytest.approx([16, 16])
    assert [bar.get_width() for bar in right.patches] == pytest.approx(
        [0.2, 0.3, 0.05, 0.05, 0, 0.1]
    )
    assert list(right.lines[0].get_xdata()) == [0.21, 0.4]
    assert [text.get_text() for text in right.get_legend().texts] == [
        "computing",
        "over data",
        "over model",
    ]
