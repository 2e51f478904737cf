"""Advice: each rule, what it saves, and reports without a reason for it."""

import dataclasses
import importlib

import pytest

from isoshard.planner.reports.advice import advise
from isoshard.planner.reports.report import CollectiveUse
from tests.planner.reports.sample_reports import DOWN, GIB, UP, fitting, too_large


def advice_with(report, text):
    """The one sentence that has the words."""
    [sentence] = [advice for advice in advise(report) if text in advice]
    return sentence


def has_none(report, text):
    return not any(text in advice for advice in advise(report))


def with_memory(report, **changes):
    memory = dataclasses.replace(report.memory, **changes)
    peak = sum((memory.parameters, memory.buffers, memory.optimizer, memory.inputs))
    memory = dataclasses.replace(memory, peak=peak + memory.activations)
    return dataclasses.replace(report, memory=memory)


def test_memory_is_saved_by_splitting_replicated_state_first():
    assert advise(fitting()) == ()  # it fits, and computes
    sentences = advise(too_large())
    saves = [float(advice.split("saves ")[1].split(" GiB")[0]) for advice in sentences[:4]]
    assert saves == sorted(saves, reverse=True) == [84.4, 30.0, 20.0, 15.0]
    assert advice_with(too_large(), "fsdp") == (
        "split parameters and optimizer state over 'data' (Plan.fsdp('data')): saves 84.4 GiB "
        "a device at rest, then it fits"
    )
    split = tuple(
        dataclasses.replace(use, axes=use.free, free=()) if use.role == "parameter" else use
        for use in too_large().inputs
    )
    assert advice_with(too_large(inputs=split), "split optimizer").startswith(
        "split optimizer state over 'data': saves 56.2 GiB a device at rest"
    )
    odd = tuple(dataclasses.replace(use, free=()) for use in split)
    assert has_none(too_large(inputs=odd), "split ")
    report = with_memory(too_large(), activations=100 * GIB)
    assert advice_with(report, "fsdp").endswith("; 31.1 GiB are still too much then")
    assert all(
        "over 'data' take" in advice for advice in advise(too_large(inputs=()))
    )  # no guesses


@pytest.mark.parametrize(
    ("framework", "how"),
    [
        ("jax", "jax.checkpoint"),
        ("flax", "flax.nnx.remat"),
        ("torch", "isoshard.torch_bridge.recompute.checkpoint_module"),
    ],
)
def test_activations_are_computed_again(framework, how):
    report = with_memory(fitting(framework=framework), activations=14 * GIB)
    assert advice_with(report, "again") == (
        "activations are 87 % of the peak, 14.0 GiB: compute them again in the backward pass "
        f"({how}), which saves at most 14.0 GiB a device, of which 1.1 GiB are needed"
    )
    package, _, name = how.rpartition(".")
    assert callable(getattr(importlib.import_module(package), name))
    onnx = dataclasses.replace(report, framework="onnx")
    assert has_none(onnx, "again") and has_none(too_large(), "again")  # there are few
    assert "saves at most 7.0 GiB a device, of which" in advice_with(report, "halve the batch")
    assert has_none(dataclasses.replace(report, inputs=()), "halve the batch")
    tight = with_memory(fitting(), activations=12 * GIB)
    assert tight.fits
    assert advice_with(tight, "again").endswith("saves at most 12.0 GiB a device")


def test_fewer_bits_and_twice_the_devices():
    assert advice_with(too_large(), "keep parameters").startswith(
        "keep parameters in bfloat16 instead of float32: saves 15.0 GiB a device"
    )
    assert advice_with(too_large(), "keep optimizer").startswith(
        "keep optimizer state in bfloat16 instead of float32: saves 30.0 GiB a device"
    )
    report = with_memory(fitting(), activations=20 * GIB)
    assert has_none(report, "keep parameters")  # they are in bfloat16
    assert advice_with(report, "twice") == (
        "take twice the devices (512, data=32): with the same batch what 'data' splits halves, "
        "which saves 11.0 GiB a device, then it fits"
    )
    replicated = tuple(dataclasses.replace(use, axes=()) for use in report.inputs)
    assert has_none(dataclasses.replace(report, inputs=replicated), "twice")


class TestTime:
    def test_an_axis_that_splits_nothing(self):
        inputs = tuple(
            dataclasses.replace(use, axes=tuple(name for name in use.axes if name == "data"))
            for use in fitting().inputs
        )
        report = fitting(inputs=inputs, collectives=fitting().collectives[:2])
        busy = report.time.busy
        assert advice_with(report, "use axis") == (
            "use axis 'model': batch and model are whole along it, so its 16 devices do the same "
            f"work; splitting the batch over it saves {busy * 15 / 16 * 1e3:.0f} ms of "
            f"{busy * 1e3:.0f} ms of computing"
        )

    def test_devices_that_share_the_work_without_the_batch_are_not_idle(self):
        inputs = tuple(
            dataclasses.replace(use, axes=(), free=("data", "model"))
            if use.role == "input"
            else use
            for use in fitting().inputs
        )
        assert advise(fitting(inputs=inputs)) == ()

    def test_talking_longer_than_computing(self):
        assert advice_with(too_large(), "over 'data' take") == (
            "all-reduces over 'data' take 1.30 s, computing 600 ms: a batch 2.2 times as large per "
            "device would hide what does not grow with it, or fewer shards; 700 ms are waited for"
        )
        time = dataclasses.replace(fitting().time, collectives={"data": 0.9})
        assert advice_with(fitting(time=time), "over 'data'").startswith(
            "collectives over 'data' (all-gather, reduce-scatter) take 900 ms, computing 586 ms: "
        )

    def test_fewer_shards_where_the_batch_is_replicated(self):
        base = fitting()
        time = dataclasses.replace(base.time, collectives={"model": 0.9, "data": 0.1})
        assert advice_with(fitting(time=time), "over 'model' take").endswith(
            "fewer shards than 16 along it; 314 ms are waited for"
        )
        both = dataclasses.replace(base.time, collectives={"data+model": 0.9})
        assert advice_with(fitting(time=both, inputs=()), "over 'data+model' take").endswith(
            "fewer shards than 256 along it; 314 ms are waited for"
        )

    @pytest.mark.parametrize(
        ("topology", "mesh", "text"),
        [
            (
                "h100:4x8",
                {"model": 4, "data": 8},
                "axis 'model' crosses hosts: 50 GB/s a device against 450 GB/s inside; put it last "
                "in the mesh, so that 'data' crosses them instead: saves at most 267 ms",
            ),
            ("h100:4x8", {"data": 4, "model": 8}, None),
            ("h100:4x8", {"model": 32}, None),
            ("v5e:16x16", {"model": 16, "data": 16}, None),
            ("unknown:8", {"model": 4, "data": 8}, None),
        ],
    )
    def test_an_axis_that_crosses_hosts(self, topology, mesh, text):
        time = dataclasses.replace(fitting().time, collectives={"model": 0.3, "data": 0.1})
        uses = (
            CollectiveUse("all-reduce", ("model",), 1 << 20, 1, DOWN, 0.3),
            CollectiveUse("all-gather", ("data",), 1 << 20, 1, UP, 0.1),
        )
        report = fitting(topology=topology, mesh=mesh, time=time, collectives=uses, inputs=())
        crossings = [advice for advice in advise(report) if "crosses" in advice]
        assert crossings == ([text] if text else [])

    def test_waiting_for_memory(self):
        time = dataclasses.replace(
            fitting().time, compute=0.1, memory=0.5, busy=0.5, overlapped=0.5, limit="memory"
        )
        text = "moving 288.7 GiB takes 500 ms, computing 100 ms, and 400 ms are waited for: "
        assert advice_with(fitting(time=time), "waited for") == (
            f"{text}most of the time goes into llama.py:43 (forward), 288 ms of 500 ms; fuse it, "
            "or let it work on fewer bytes (bfloat16)"
        )
        assert has_none(fitting(time=time, timeline=()), "waited for")
        little = dataclasses.replace(time, compute=0.499)
        assert has_none(fitting(time=little), "waited for")
        report = fitting(time=time, bytes_moved=6e9)
        assert advice_with(report, "waited for").endswith(
            "computing 100 ms, and 400 ms are waited for: 89 % of it are parameters and optimizer "
            "state, which a larger batch per device reads for more rows"
        )
