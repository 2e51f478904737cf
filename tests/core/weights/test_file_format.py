"""Damaged files and indices: clear errors, and nothing is read outside."""

import json
import struct

import numpy as np
import pytest

from isoshard.core.layout.mesh import make_mesh
from isoshard.core.weights import FileFormatError, load_safetensors
from isoshard.core.weights.file_format import LONGEST_HEADER, pack_header, read_header
from isoshard.core.weights.folder import INDEX, open_weights


def write(path, header, data=b"", *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(struct.pack("<Q", size) + text + data)
    return path


def entry(start, end, shape=None, dtype="U8"):
    return {"dtype": dtype, "shape": shape or [end - start], "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "data", "why"),
    [
        (b"{", b"", "is no JSON"),
        (b"[]", b"", "no mapping, but a list"),
        (b"\xff\xfe", b"", "is no JSON"),
        (b"[" * 100_000, b"", "is no JSON"),
        (b'{"a":1,"a":2}', b"", "repeated: a"),
        ({"a": 3}, b"", "a: has not dtype, shape and data_offsets"),
        ({"a": entry(0, 1, dtype="Q8")}, b"0", "unknown dtype 'Q8'"),
        ({"a": entry(0, 1, dtype="F4")}, b"0", "smaller than a byte are not supported"),
        ({"a": entry(0, 1, [-1])}, b"0", "are no counts"),
        ({"a": entry(0, 1, [1 << 70])}, b"0", "are no counts"),
        ({"a": {**entry(0, 1), "data_offsets": [0]}}, b"0", "are no counts"),
        ({"a": entry(0, 3, [2], "U16")}, b"000", r"takes 4 bytes, and its offsets \[0, 3\] hold 3"),
        ({"a": entry(0, 4)}, b"00", "bytes 0 to 4 of 2: the file is cut off"),
        ({"a": entry(0, 4), "b": entry(2, 6)}, b"0" * 6, "b: bytes 2 to 6 overlap a"),
        ({"a": entry(0, 2), "b": entry(3, 4)}, b"0" * 4, "bytes 2 to 3 before it belong to no"),
        ({"a": entry(0, 2)}, b"0" * 4, "bytes 2 to 4 at the end belong to no tensor"),
        ({"__metadata__": {"a": 1}}, b"", "no mapping of strings"),
    ],
)
def test_a_damaged_header(tmp_path, header, data, why):
    path = write(tmp_path / "a.safetensors", header, data)
    with pytest.raises(FileFormatError, match=why):
        read_header(path)


def test_all_faults_at_once_and_lengths_that_cannot_be(tmp_path):
    header = {"a": 3, "b": entry(0, 1, dtype="Q8")}
    with pytest.raises(FileFormatError, match=r"(?s)2 errors.*a: has not.*b: unknown"):
        read_header(write(tmp_path / "a.safetensors", header, b"0"))
    for length in (3, LONGEST_HEADER + 1, 1 << 63):
        path = write(tmp_path / "a.safetensors", b"{}", length=length)
        with pytest.raises(FileFormatError, match=f"length would be {length} bytes"):
            read_header(path)
    path.write_bytes(b"1234567")
    with pytest.raises(FileFormatError, match="are no safetensors file"):
        read_header(path)


def test_every_cut_is_noticed(tmp_path):
    whole = pack_header({"a": (np.dtype("float32"), (3, 2)), "b": (np.dtype("bool"), (5,))})
    whole += bytes(29)
    path = tmp_path / "a.safetensors"
    path.write_bytes(whole)
    assert set(read_header(path)[0]) == {"a", "b"}
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        with pytest.raises(FileFormatError):
            read_header(path)


def test_a_file_cut_off_after_its_header_was_read(tmp_path, monkeypatch):
    from isoshard.core.weights import loading

    path = write(tmp_path / "model.safetensors", {"a": entry(0, 4096)}, bytes(4096))
    catalogue = open_weights(path)
    path.write_bytes(path.read_bytes()[:1000])
    monkeypatch.setattr(loading, "open_weights", lambda path: catalogue)
    with pytest.raises(FileFormatError, match=r"model\.safetensors: a: the file ends at byte 1000"):
        load_safetensors(path, make_mesh((8,), ("x",)), None)


def index(folder, places):
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def test_an_index_that_leads_out(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    write(tmp_path / "outside.safetensors", {"a": entry(0, 1)}, b"0")
    names = ["../", "a/../../", "/etc/", "..\\", "C:", "C:/"]
    names = [f"{name}outside.safetensors" for name in names]
    for name in (*names, "a\0.safetensors", "", "config.json", 7, None):
        with pytest.raises(FileFormatError, match="leads out of its folder"):
            open_weights(index(folder, {"a": name}))


@pytest.mark.parametrize(
    ("places", "why"),
    [
        ({"a": "one.safetensors", "b": "none.safetensors"}, r"none\.safetensors: there is no such"),
        ({"a": "one.safetensors"}, r"b: is in one\.safetensors, and in None by the index"),
        (
            {"a": "one.safetensors", "b": "one.safetensors", "c": "one.safetensors"},
            "c: the index says .* which does not have it",
        ),
        ({}, "has no 'weight_map'"),
    ],
)
def test_an_index_that_does_not_fit(tmp_path, places, why):
    write(tmp_path / "one.safetensors", {"a": entry(0, 1), "b": entry(1, 2)}, b"00")
    with pytest.raises(FileFormatError, match=why):
        open_weights(index(tmp_path, places))


def test_a_folder_without_weights(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"there is no model\.safetensors"):
        open_weights(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        open_weights(tmp_path / "nothing")
    (tmp_path / INDEX).write_text("{")
    with pytest.raises(FileFormatError, match="is no JSON"):
        open_weights(tmp_path)


def test_a_folder_with_several_files_and_no_index(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / f"{name}.safetensors", {name: entry(0, 1)}, b"0")
    with pytest.raises(FileFormatError, match=r"which of a\.safetensors, b\.safetensors"):
        open_weights(tmp_path)
    assert set(open_weights(tmp_path / "a.safetensors").tensors) == {"a"}


def test_the_header_is_as_the_format_says():
    header = pack_header({"w": (np.dtype("float32"), (2,))}, {"format": "pt"})
    assert struct.unpack("<Q", header[:8])[0] == len(header) - 8
    assert len(header) % 8 == 0
    assert json.loads(header[8:]) == {
        "__metadata__": {"format": "pt"},
        "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    }
