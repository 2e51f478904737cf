"""`iso.data.loader`: what comes, in which order, laid out how, and what is left behind."""

import gc
import threading
import time
import weakref

import jax
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec as P

import isoshard as iso
from isoshard.core.runtime import metrics, samples


def batches(*rows, columns=4):
    random = np.random.default_rng(0)
    return [
        {"x": random.standard_normal((n, columns), np.float32), "y": random.integers(0, 9, n)}
        for n in rows
    ]


def threads():
    return [t for t in threading.enumerate() if t.name == "isoshard data loader"]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    for thread in threads():
        thread.join(5)
    assert not threads()


class Failing:
    """Two batches, then an error."""

    def __iter__(self):
        yield from batches(8, 8)
        raise OSError("the disk is gone")


def sequences(*lengths, **more):
    return [
        {
            "input_ids": np.ones((8, n), np.int32),
            "labels": np.ones((8, n), np.int32),
            "score": np.ones((8, 3), np.float32),
            **more,
        }
        for n in lengths
    ]


class TestLengths:
    def test_sequences_are_padded_to_the_smallest_length_that_is_enough(self, mesh):
        metrics.reset()
        source = sequences(3, 4, 5, 9)
        loaded = list(iso.data.loader(source, mesh, P("x"), lengths=(12, 4)))
        assert [batch["input_ids"].shape[1] for batch in loaded] == [4, 4, 12, 12]
        for batch, given in zip(loaded, source, strict=True):
            count = given["labels"].shape[1]
            assert np.array_equal(batch["labels"][:, :count], given["labels"])
            assert np.all(np.asarray(batch["labels"][:, count:]) == -100)
            assert np.all(np.asarray(batch["input_ids"][:, count:]) == 0)
            assert batch["score"].shape == (8, 3)
        assert metrics.counters()["data.padded_positions"] == 2 * 8 * (1 + 0 + 7 + 3)

    def test_other_arrays_are_named_by_fill(self, mesh):
        source = [{"frames": np.ones((8, 3, 5), np.float32), "labels": np.ones((8, 3), np.int32)}]
        (batch,) = iso.data.loader(source, mesh, P("x"), lengths=(4,), fill={"frames": np.nan})
        assert batch["frames"].shape == (8, 4, 5) and bool(np.isnan(batch["frames"][:, 3]).all())
        assert batch["labels"].shape == (8, 3)

    @pytest.mark.parametrize(
        ("options", "source", "message"),
        [
            ({"lengths": (4, 8)}, sequences(9), "9 is longer than the last of lengths=\\(4, 8\\)"),
            (
                {"lengths": (4,), "fill": {"words": 0}},
                sequences(3),
                "pads words, and the batch has",
            ),
            ({"lengths": (4,), "fill": {"n": 0}}, sequences(3, n=np.ones(8)), "ndarray of 1 axes"),
            ({"lengths": ()}, sequences(3), "lengths=\\(\\) are no lengths"),
            ({"lengths": (0, 4)}, sequences(3), "give integers above 0"),
            ({"fill": {"input_ids": 1}}, sequences(3), "needs lengths="),
        ],
        ids=["too long", "other names", "one axis", "none", "zero", "fill alone"],
    )
    def test_mistakes_raise(self, mesh, options, source, message):
        with pytest.raises(iso.ShardingError, match=message):
            list(iso.data.loader(source, mesh, P("x"), **options))


class TestBatches:
    @pytest.mark.parametrize("prefetch", [0, 2])
    def test_all_come_in_order_and_sharded(self, mesh, prefetch):
        source = batches(*[8] * 5)
        found = list(iso.data.loader(source, mesh, P("x"), prefetch=prefetch))
        assert len(found) == 5
        for got, want in zip(found, source, strict=True):
            assert got["x"].sharding == iso.shard(want["x"], mesh, P("x")).sharding
            assert got["y"].sharding.spec == P("x")
            assert got["y"].dtype == np.int32
            np.testing.assert_array_equal(got["x"], want["x"])
            np.testing.assert_array_equal(got["y"], want["y"])

    def test_it_can_be_iterated_again_if_the_source_can(self, mesh):
        loader = iso.data.loader(batches(8, 8), mesh, P("x"))
        assert (len(loader), len(list(loader)), len(list(loader))) == (2, 2, 2)
        assert repr(loader) == "<loader of a list by P('x',), prefetch=2>"
        once = iso.data.loader(iter(batches(8)), mesh, P("x"))
        assert (len(list(once)), len(list(once))) == (1, 0)

    def test_specs_are_one_a_tree_or_a_plan(self, mesh):
        source = [([np.ones((8, 4), np.float32)], np.float32(2.5), 3)]
        for spec in (([P("x", "y")], None, None), iso.Plan({"0.0": P("x", "y"), "?": None})):
            [(arrays, scalar, number)] = iso.data.loader(source, mesh, spec)
            assert arrays[0].sharding.spec == P("x", "y")
            assert (scalar.item(), number.item()) == (2.5, 3)

    def test_a_plan_for_a_model_says_what_its_inputs_are(self, mesh):
        plan = iso.Plan({"*.kernel": P(None, "y")}, inputs={"x": P("x"), "*": None})
        [batch] = iso.data.loader(batches(8), mesh, plan)
        assert (batch["x"].sharding.spec, batch["y"].sharding.spec) == (P("x"), P())

    def test_sources_of_other_frameworks(self, mesh):
        data = torch.utils.data.TensorDataset(torch.arange(16.0).bfloat16(), torch.arange(16))
        loader = torch.utils.data.DataLoader(data, batch_size=8)
        first, second = iso.data.loader(loader, mesh, P("x"))
        assert first[0].dtype == jax.numpy.bfloat16
        np.testing.assert_array_equal(second[1], np.arange(8, 16))

        class Eager:  # as tf.data gives them
            def __array__(self, dtype=None, copy=None):
                return np.arange(8, dtype=dtype)

        [batch] = iso.data.loader([{"t": Eager(), "j": jax.numpy.ones(8)}], mesh, P("x"))
        np.testing.assert_array_equal(batch["t"], np.arange(8))
        assert batch["j"].sharding.spec == P("x")

    def test_torch_tensors_on_the_device(self, mesh):
        source = [{"x": torch.ones(5, 4), "y": torch.arange(5), "b": torch.ones(5).bfloat16()}]
        options = {"framework": "torch", "last": "pad", "mask": "real"}
        [batch] = iso.data.loader(source, mesh, P("y"), **options)
        assert {t.device.type for t in batch.values()} == {"jax"}
        kinds = {key: tensor.dtype for key, tensor in batch.items()}
        assert kinds == {
            "x": torch.float32,
            "y": torch.int64,
            "b": torch.bfloat16,
            "real": torch.bool,
        }
        assert iso.sharding_of(batch["y"]).spec == P("y")
        assert batch["y"].cpu().tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
        assert batch["real"].sum().item() == 5

    def test_a_source_may_reuse_its_memory(self, mesh):
        memory = iso.core.transfer.exchange.aligned_empty((8, 16), np.float32)

        def source():
            for number in range(6):
                memory[:] = number
                yield memory

        for number, batch in enumerate(iso.data.loader(source(), mesh, P("x"), prefetch=3)):
            assert np.unique(batch).tolist() == [number]

    def test_memory_is_shared_on_request(self, mesh, counted):
        memory = iso.core.transfer.exchange.aligned_empty((8, 16), np.float32)
        memory[:] = 1
        [batch] = iso.data.loader([memory], mesh, P("x"), copy=False)
        assert batch.addressable_shards[0].data.unsafe_buffer_pointer() == memory.ctypes.data
        assert counted("copies") == 0
        with pytest.raises(iso.errors.CopyError, match=r"batch: .*not contiguous"):
            next(iter(iso.data.loader([memory], mesh, P(None, "x"), copy=False)))

    def test_a_thread_sees_the_settings_of_its_maker(self, mesh):
        with jax.enable_x64(True):
            [batch] = iso.data.loader([np.arange(8.0)], mesh, P("x"))
        assert batch.dtype == np.float64


class TestUnevenRows:
    def test_error(self, mesh):
        found = iter(iso.data.loader(batches(8, 6), mesh, P("y")))
        next(found)
        with pytest.raises(
            iso.errors.UnevenError,
            match=r"batch\.x has 6 rows for 4 shards; batch\.y has 6.*last='drop'",
        ):
            next(found)
        with pytest.raises(StopIteration):
            next(found)

    def test_drop_takes_the_last_one_only(self, mesh, counted):
        assert len(list(iso.data.loader(batches(8, 8, 6), mesh, P("y"), last="drop"))) == 2
        assert counted("data.dropped_rows") == 6
        assert len(list(iso.data.loader(batches(8, 4), mesh, P("y"), last="drop"))) == 2
        with pytest.raises(
            iso.errors.UnevenError, match=r"6 rows for 4 shards.*It is not the last one"
        ):
            list(iso.data.loader(batches(8, 6, 8), mesh, P("y"), last="drop"))

    def test_pad_fills_up_to_the_first_batch(self, mesh, counted):
        source = batches(8, 8, 3)
        *_, last = iso.data.loader(source, mesh, P("y"), last="pad", mask="real")
        index = np.arange(8) % 3
        np.testing.assert_array_equal(last["x"], source[2]["x"][index])
        np.testing.assert_array_equal(last["y"], source[2]["y"][index])
        np.testing.assert_array_equal(last["real"], np.arange(8) < 3)
        assert last["real"].sharding.spec == P("y")
        assert counted("data.padded_rows") == 5
        assert "real" not in source[2]

    def test_pad_takes_other_arrays_of_as_many_rows_along(self, mesh):
        source = [{"x": np.ones((3, 4), np.float32), "y": np.arange(3), "table": np.arange(7)}]
        spec = {"x": P("x"), "y": None, "table": None}
        [batch] = iso.data.loader(source, mesh, spec, last="pad")
        assert batch["y"].tolist() == [0, 1, 2, 0]
        assert batch["table"].shape == (7,)
        [batch] = iso.data.loader(source, mesh, iso.Plan({"x": P("y"), "*": None}), last="pad")
        assert batch["x"].shape == (4, 4)

    def test_padding_that_is_not_possible(self, mesh):
        uneven = [{"x": np.ones((3, 4), np.float32), "y": np.arange(2)}]
        with pytest.raises(iso.ShardingError, match=r"batch\.x has 3, batch\.y has 2\. Use last"):
            list(iso.data.loader(uneven, mesh, P("x"), last="pad"))
        with pytest.raises(iso.ShardingError, match="no array of the batch is split there"):
            list(iso.data.loader(uneven, mesh, None, last="pad"))
        with pytest.raises(
            iso.errors.UnevenError, match="a batch of no rows cannot be padded to 8"
        ):
            list(iso.data.loader(batches(8, 0), mesh, P("x"), last="pad"))
        with pytest.raises(iso.ShardingError, match=r"batch\.x: a .* on devices cannot be padded"):
            list(iso.data.loader([{"x": jax.numpy.ones(3)}], mesh, P("x"), last="pad"))

    def test_other_axes_are_an_error_whatever_happens_to_rows(self, mesh):
        with pytest.raises(iso.errors.UnevenError, match=r"batch\.x: shape \(8, 6\).*axis 1"):
            list(iso.data.loader([{"x": np.ones((8, 6))}], mesh, P("x", "y"), last="pad"))


class TestErrors:
    @pytest.mark.parametrize("prefetch", [0, 2])
    def test_one_of_the_source_comes_in_its_place(self, mesh, prefetch):
        found = iter(iso.data.loader(Failing(), mesh, P("x"), prefetch=prefetch))
        next(found)
        next(found)
        with pytest.raises(OSError, match="the disk is gone") as caught:
            next(found)
        assert "yield from batches(8, 8)" not in str(caught.value)
        assert any(entry.name == "__iter__" for entry in caught.traceback)
        assert next(found, None) is None

    def test_all_faults_of_a_batch_at_once(self, mesh):
        source = [{"a": np.ones((8, 2), np.float32), "b": np.ones(8, np.float32)}]
        with pytest.raises(iso.errors.SpecError, match=r"(?s)batch\.b: spec.*2 entries"):
            list(iso.data.loader(source, mesh, P("x", None), name="batch"))
        with pytest.raises(iso.errors.CopyError, match=r"(?s)2 leaves.*in\.a: .*in\.b: "):
            source = [{"a": np.full((8, 2), 1 << 40), "b": np.full(8, 1 << 40)}]
            list(iso.data.loader(source, mesh, P("x"), name="in"))

    def test_leaves_that_are_no_arrays(self, mesh):
        source = [{"a": np.ones(8, np.float32), "names": ["u", "v"], "o": object()}]
        with pytest.raises(TypeError, match=r"batch\.names\.0 is str;.*batch\.o is object\. Take"):
            list(iso.data.loader(source, mesh, P("x")))
        with pytest.raises(
            TypeError, match=r"NumPy takes plain CPU tensors only.*on jax:0; pass x\.cpu\(\)"
        ):
            list(iso.data.loader([torch.ones(8, device="jax")], mesh, P("x")))

    def test_options(self, mesh):
        with pytest.raises(
            iso.ShardingError,
            match=r"prefetch=-1 is no.*last='keep' is none.*mask='m' masks.*framework='tf' is",
        ):
            iso.data.loader([], mesh, P("x"), prefetch=-1, last="keep", mask="m", framework="tf")
        with pytest.raises(TypeError, match="an iterable of batches, not a int"):
            iso.data.loader(3, mesh, P("x"))
        for batch, kind, message in (
            (np.ones(8, np.float32), TypeError, "is a ndarray; let the source give dictionaries"),
            ({"m": np.ones(8)}, iso.ShardingError, "already has an entry 'm'"),
        ):
            with pytest.raises(kind, match=message):
                list(iso.data.loader([batch], mesh, P("x"), last="pad", mask="m"))


class TestThread:
    def test_it_reads_no_further_than_asked(self, mesh):
        read = []

        def source():
            for number in range(100):
                read.append(number)
                yield np.full(8, number, np.int32)

        with iter(iso.data.loader(source(), mesh, P("x"), prefetch=3)) as found:
            next(found)
            time.sleep(0.2)
            assert len(read) <= 4
        assert not threads()

    def test_it_ends_when_the_consumer_fails(self, mesh):
        def consume():
            for _ in iso.data.loader(batches(*[8] * 50), mesh, P("x")):
                raise RuntimeError("out of patience")

        with pytest.raises(RuntimeError, match="patience"):
            consume()

    def test_closing_ends_a_generator_in_its_thread(self, mesh):
        ended = []

        def source():
            try:
                while True:
                    yield np.ones(8, np.float32)
            finally:
                ended.append(threading.current_thread().name)

        found = iter(iso.data.loader(source(), mesh, P("x")))
        next(found)
        found.close()
        gc.collect()
        assert next(found, None) is None
        assert ended == ["isoshard data loader"]

    def test_batches_are_not_kept(self, mesh):
        found = iter(iso.data.loader(batches(*[8] * 3), mesh, P("x"), prefetch=1))
        gone = weakref.ref(next(found)["x"])
        next(found)
        time.sleep(0.1)
        gc.collect()
        assert gone() is None
        found.close()

    def test_it_works_while_the_loop_does(self, mesh):
        made = [threading.Event() for _ in range(4)]

        def source():
            for event in made:
                yield np.ones(8, np.float32)
                event.set()

        for event, _ in zip(made, iso.data.loader(source(), mesh, P("x")), strict=True):
            assert event.wait(60)  # the next batch is asked for while this one is at work


def test_counts(mesh, counted):
    def slow():
        time.sleep(0.05)
        yield np.ones((8, 4), np.float32)

    assert len(list(iso.data.loader(slow(), mesh, P("x")))) == 1
    assert counted("data.batches") == 1
    assert counted("data.waits") == 1
    assert counted("transfers.host_to_device_bytes") == 128
    assert metrics.transfers()[0].where.startswith("test_data.py:")
    assert samples.series()["data.wait_seconds"].total > 0.01


def test_one_process_has_the_local_part_too(mesh):
    source = batches(8, 8, 6)
    for spec in (P("y"), iso.Plan({"*": P("y")})):
        found = list(iso.data.loader(source, mesh, spec, local=True, last="pad"))
        assert [batch["x"].shape for batch in found] == [(8, 4)] * 3
        np.testing.assert_array_equal(found[1]["x"], source[1]["x"])
