"""Hostile files are refused with a reason, nothing outside the folder is read, nothing dangles."""

import itertools
import os
import time

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from isoshard.onnx_bridge import AnnotationError, AnnotationWarning, ModelError, load
from isoshard.onnx_bridge.reading import soundness
from tests.onnx_bridge.checking.broken import sound, value

SECRET = np.full((8, 16), 1234.5, np.float32)


def model(*nodes, inputs=("x",), outputs=("y",), weights=(), functions=()):
    values = [value(name, [4, 8]) for name in inputs]
    results = [value(name, [4, 8]) for name in outputs]
    graph = helper.make_graph(list(nodes), "g", values, results, list(weights))
    domains = [helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)]
    made = helper.make_model(graph, ir_version=11, opset_imports=domains)
    made.functions.extend(functions)
    return made


def relu(reads="x", makes="y", **more):
    return helper.make_node("Relu", [reads], [makes], name=f"to_{makes}", **more)


def refused(source, match, **more):
    with pytest.raises(ModelError, match=match) as caught:
        load(source, **more)
    return str(caught.value)


class TestFiles:
    def test_a_sound_one(self, tmp_path):
        path = tmp_path / "m.onnx"
        onnx.save(sound(), path)
        assert load(path) == load(str(path)) == load(path.read_bytes()) == sound()

    @pytest.mark.parametrize("suffix", ["json", "textproto"])
    def test_as_text(self, tmp_path, suffix):
        path = tmp_path / f"m.{suffix}"
        onnx.save(sound(), path)
        assert load(path) == sound()
        path.write_text(path.read_text()[:-9])
        refused(path, f"it is no {suffix} of a model")

    def test_truncated_at_any_byte(self):
        data = sound().SerializeToString()
        whole = 0
        for end in range(len(data)):
            try:
                load(data[:end])
            except (ModelError, AnnotationError):
                continue
            except AnnotationWarning:
                pass
            whole += 1
        assert whole < 12  # cut between two fields it may be a smaller model

    def test_what_is_no_file(self, tmp_path):
        refused(tmp_path / "none.onnx", "No such file")
        refused(tmp_path, "no regular file|Is a directory")
        os.mkfifo(tmp_path / "pipe.onnx")
        refused(tmp_path / "pipe.onnx", "no regular file")
        refused(b"", "it has no IR version; it has no graph")
        refused(b"<html>", "no ONNX file, or only a part of one")

    def test_too_large(self, tmp_path):
        path = tmp_path / "m.onnx"
        with path.open("wb") as file:
            file.truncate(1 << 31)
        refused(path, "2147483648 bytes, and a model has 2147483647 at most: keep weights in other")

    @pytest.mark.parametrize("suffix", ["onnx", "json", "textproto"])
    def test_nested_too_deeply(self, tmp_path, suffix):
        path = tmp_path / f"m.{suffix}"
        if suffix == "onnx":
            inner = b""
            for _ in range(500):  # graph { node { attribute { g
                for tag in (b"\x32", b"\x2a", b"\x0a"):
                    inner = tag + onnx_varint(len(inner)) + inner
            path.write_bytes(b"\x08\x0b\x3a" + onnx_varint(len(inner)) + inner)
        elif suffix == "json":
            path.write_text('{"graph": ' + "[" * 100_000)
        else:
            path.write_text("graph { node { attribute { g {" * 20_000)
        refused(path, "not a model that can be read")


def onnx_varint(number):
    data = b""
    while number > 127:
        data += bytes([number & 127 | 128])
        number >>= 7
    return data + bytes([number])


class TestGraphs:
    def test_every_fault_in_one_message(self):
        nodes = [relu("x", "a"), relu("x", "a"), relu("nowhere")]
        said = refused(model(*nodes, outputs=["y", "z"]), "which nothing makes")
        assert "node 'to_a' makes 'a', which is there already" in said
        assert "output 'z' of the graph is made by nothing" in said

    def test_long_names_and_many_faults_stay_short(self):
        nodes = [relu("n" * 10_000, f"v{n}") for n in range(1000)]
        assert len(refused(model(*nodes, outputs=[]), "and 992 more")) < 4000

    def test_cyclic(self):
        add = helper.make_node("Add", ["x", "b"], ["a"])
        refused(
            model(add, relu("a", "b"), relu("b")), "the graph is cyclic: 'a' needs 'b' needs 'a'"
        )

    def test_cyclic_in_an_inner_graph(self):
        loop = helper.make_graph([relu("b", "a"), relu("a", "b")], "t", [], [value("b", [1])])
        node = helper.make_node("If", ["x"], ["y"], then_branch=loop, else_branch=loop, name="if")
        refused(model(node), "then_branch of node 'if' is cyclic")

    def test_a_long_cycle_is_found_without_recursion(self):
        nodes = [relu(f"v{n + 1}", f"v{n}") for n in range(5000)] + [relu("v0", "v5000")]
        refused(model(*nodes, outputs=["v0"]), "cyclic: 'v0' needs 'v1'")

    def test_nodes_without_number(self, monkeypatch):
        assert soundness.MOST_NODES == 1_000_000
        monkeypatch.setattr(soundness, "MOST_NODES", 1000)
        inner = b"\x0a\x00" * 1001  # each an empty node
        data = b"\x08\x0b\x3a" + onnx_varint(len(inner)) + inner
        refused(data, "it has more than 1000 nodes")

    def test_texts_that_are_none(self):
        data = model(relu()).SerializeToString().replace(b"to_y", b"to_\xff")
        refused(data, r"a text \(name of NodeProto\) is no UTF-8: b'to_\\xff'")

    def test_operator_sets_of_no_version(self):
        made = sound()
        made.opset_import[0].version = 1 << 40
        refused(made, "operator set '' has version 1099511627776")

    def test_devices_without_number(self):
        made = sound()
        made.configuration[0].num_devices = (1 << 31) - 1
        refused(made, "for 2147483647 devices, the most is 65536")


def function(name, *nodes):
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)]
    return helper.make_function("mine", name, ["a"], ["b"], nodes, opsets)


def call(name, reads="a", makes="b"):
    return helper.make_node(name, [reads], [makes], domain="mine")


class TestFunctions:
    def test_that_grow_without_measure(self):
        functions = [function("f0", relu("a", "b"))]
        for level in range(1, 12):
            names = ["a", *(f"v{n}" for n in range(9)), "b"]
            calls = [call(f"f{level - 1}", *pair) for pair in itertools.pairwise(names)]
            functions.append(function(f"f{level}", *calls))
        start = time.perf_counter()
        refused(
            model(call("f11", "x", "y"), functions=functions),
            "written out, are more than 1000000 nodes",
        )
        assert time.perf_counter() - start < 5

    def test_that_call_themselves(self):
        functions = [function("f", call("g")), function("g", call("f"))]
        refused(model(call("f", "x", "y"), functions=functions), "'f' calls 'g' calls 'f'")

    def test_that_are_there_twice(self):
        functions = [function("f", relu("a", "b"))] * 2
        refused(model(call("f", "x", "y"), functions=functions), "there are two functions 'f'")


class TestTensors:
    @pytest.mark.parametrize(
        ("tensor", "why"),
        [
            ({"dims": [1 << 62, 1 << 62], "raw_data": b"0123"}, "bytes, but it has 4"),
            ({"dims": [1 << 40], "float_data": [1.0]}, "of FLOAT, but it has 1 numbers"),
            ({"dims": [-1], "raw_data": b"0123"}, r"its shape \(-1,\) is negative"),
            ({"dims": [1] * 65, "raw_data": b"0123"}, "it has 65 axes, the most is 64"),
            ({"dims": [4], "data_type": 99, "raw_data": b"0123"}, "no element type 99"),
            ({"dims": [1 << 40], "data_type": 8, "string_data": [b"a"]}, "but it has 1"),
            ({"dims": [1 << 40], "data_type": 22, "raw_data": b"01"}, "does not fit into 2 b"),
            ({"dims": [3], "data_type": 14, "float_data": [1.0] * 3}, "COMPLEX64, but it has 3"),
        ],
    )  # fmt: skip
    def test_with_less_data_than_they_say(self, tensor, why):
        proto = onnx.TensorProto(**{"data_type": 1, "name": "w", **tensor})
        refused(model(relu(), weights=[proto]), why)
        constant = helper.make_node("Constant", [], ["c"], name="c", value=proto)
        assert "attribute 'value' of node 'c'" in refused(model(constant, relu()), why)

    @pytest.mark.parametrize(
        "array", [np.zeros((0, 1 << 40), np.float32), np.ones(3, bool), np.ones(2, np.complex64)]
    )
    def test_that_are_what_they_say(self, array):
        load(model(relu(), weights=[numpy_helper.from_array(array, "w")]))
        typed = helper.make_tensor(
            "w", helper.np_dtype_to_tensor_dtype(array.dtype), array.shape, array.ravel()
        )
        load(model(relu(), weights=[typed]))


@pytest.fixture
def outside(tmp_path):
    """A folder with a model in it, and a file beside the folder."""
    (tmp_path / "secret.bin").write_bytes(SECRET.tobytes())
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "w.bin").write_bytes(bytes(64) + SECRET.tobytes())
    return folder


def saved(folder, location, **more):
    """Save a model whose weight is in another file; its path."""
    w = onnx.TensorProto(name="w", data_type=1, dims=[8, 16])
    w.data_location = onnx.TensorProto.EXTERNAL
    for key, said in {"location": location, **more}.items():
        w.external_data.add(key=key, value=str(said))
    path = folder / "m.onnx"
    path.write_bytes(model(relu(), weights=[w]).SerializeToString())
    return path


class TestDataInOtherFiles:
    def test_is_read(self, outside):
        for more in ({}, {"length": 512}):
            (w,) = load(saved(outside, "w.bin", offset=64, **more)).graph.initializer
            np.testing.assert_array_equal(numpy_helper.to_array(w), SECRET)
            assert not w.external_data

    def test_of_a_model_in_memory(self, outside):
        path = saved(outside, "w.bin", offset=64)
        bare = onnx.load(path, load_external_data=False)
        refused(bare, "in other files: pass folder=")
        refused(path.read_bytes(), "in other files: pass folder=")
        assert load(bare, folder=outside) == load(path)
        assert bare.graph.initializer[0].external_data  # stays as it was

    def test_outside_the_folder(self, outside):
        absolute = str(outside.parent / "secret.bin")
        for location in ("../secret.bin", "a/../../secret.bin", absolute, "/etc/passwd"):
            refused(saved(outside, location), "leaves the model's folder, which is not allowed")

    def test_behind_a_link(self, outside):
        (outside / "file").symlink_to(outside.parent / "secret.bin")
        (outside / "folder").symlink_to(outside.parent)
        (outside / "loop").symlink_to("loop")
        for location in ("file", "folder/secret.bin"):
            refused(saved(outside, location), "is a link that leaves the model's folder")
        refused(saved(outside, "loop"), "not a model that can be read")

    def test_of_no_file(self, outside):
        os.mkfifo(outside / "pipe")
        for location in ("pipe", ".", "", "w\0.bin", "none.bin", "n" * 5000):
            refused(saved(outside, location), "not a model that can be read: weight 'w': ")

    @pytest.mark.parametrize(("more", "why"), [
        ({"offset": 65}, "bytes 65 to 577 of 'w.bin', which has 576"),
        ({"offset": 1 << 62}, "it has|which has 576|no number"),
        ({"offset": -1}, "its offset '-1' is no number of bytes"),
        ({"length": 8}, r"shape \(8, 16\) of FLOAT is 512 bytes, but its length is 8"),
        ({"length": "9" * 5000}, "is no number of bytes"),
    ])  # fmt: skip
    def test_with_wrong_numbers(self, outside, more, why):
        refused(saved(outside, "w.bin", **more), why)

    def test_that_many_tensors_share(self, outside):
        path = saved(outside, "w.bin")
        made = onnx.load(path, load_external_data=False)
        for number in range(1000):
            copy = made.graph.initializer.add()
            copy.CopyFrom(made.graph.initializer[0])
            copy.name = f"w{number}"
        path.write_bytes(made.SerializeToString())
        refused(path, "tensors up to this one need 1024 bytes of 'w.bin', which has 576")

    def test_that_is_more_than_may_be_read(self, outside):
        refused(saved(outside, "w.bin"), "512 bytes, and 100 may be read", max_bytes=100)
        with (outside / "huge").open("wb") as file:
            file.truncate(1 << 42)  # no bytes on disk
        path = saved(outside, "huge")
        made = onnx.load(path, load_external_data=False)
        made.graph.initializer[0].dims[:] = [1 << 20, 1 << 20]
        path.write_bytes(made.SerializeToString())
        refused(path, "its weights are 4398046511104 bytes, and .* may be read")

    def test_in_attributes_and_functions(self, outside):
        path = saved(outside, "../secret.bin")
        w = onnx.load(path, load_external_data=False).graph.initializer[0]
        constant = helper.make_node("Constant", [], ["b"], value=w, name="c")
        inner = function("f", constant)
        refused(model(call("f", "x", "y"), functions=[inner]), "leaves", folder=outside)


class TestDangling:
    def renamed(self):
        made = sound()
        made.graph.node[0].device_configurations[0].sharding_spec[0].tensor_name = "old_w"
        return made

    def test_is_an_error_on_request(self):
        with pytest.raises(AnnotationError, match="annotations point at nothing"):
            load(self.renamed(), strict=True)
