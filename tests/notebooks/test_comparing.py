import doctest
import re
import tempfile

import nbformat
import pytest

from examples.notebooks import comparing


def notebook(*outputs):
    """A notebook of one cell that shows texts, of kind stdout unless given."""
    cell = nbformat.v4.new_code_cell("show()")
    for output in outputs:
        kind, text = output if isinstance(output, tuple) else ("stdout", output)
        if "/" in kind:
            cell.outputs.append(nbformat.v4.new_output("display_data", {kind: text}))
        else:
            cell.outputs.append(nbformat.v4.new_output("stream", name=kind, text=text))
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell("# Title"), cell])


def test_examples():
    assert doctest.testmod(comparing) == (0, 2)


@pytest.mark.parametrize(
    ("kept", "computed"),
    [
        ("loss 0.5000", "loss 0.5049"),
        ("loss  1e-05  x", "loss 1.01e-05 x"),
        ("a   b\n│ 1 │", "a b │ 1 │"),
        ("-0.25", "-0.251"),
        ("estimated in 3.40 s with jax", "estimated in 812 ms with jax"),
        ("2737 choices in 150.3 s", "2737 choices in 9.1 s"),
    ],
)
def test_what_counts_as_equal(kept, computed):
    assert comparing.differences(notebook(kept), notebook(computed)) == []


@pytest.mark.parametrize(
    ("kept", "computed", "said"),
    [
        ("loss 0.500", "loss 0.520", r"cell 2: kept '0.500', computed '0.520', after 'loss'"),
        ("12 programs", "13 programs", "kept '12', computed '13'"),
        ("0.25", "-0.25", "computed '-0.25'"),
        ("same: True", "same: False", "kept 'True', computed 'False'"),
        ("one", "one two", r"kept '\(nothing\)', computed 'two'"),
        ("loss 0.5", "loss nan", "computed 'nan'"),
        ("1e", "2e", "kept '1e', computed '2e'"),
        ("7 choices in 3 s", "8 choices in 3 s", "kept '7', computed '8'"),
    ],
)
def test_what_differs(kept, computed, said):
    (line,) = comparing.differences(notebook(kept), notebook(computed))
    assert re.search(said, line)


def test_a_picture_is_there_whatever_its_pixels():
    kept, other = notebook(("image/png", "AAAA")), notebook(("image/png", "BBBB"))
    assert comparing.differences(kept, other) == []
    (line,) = comparing.differences(kept, notebook())
    assert line == "cell 2 keeps image/png, computed nothing"


def test_a_warning_is_a_difference():
    (line,) = comparing.differences(notebook("1"), notebook(("stderr", "careful"), "1"))
    assert line == "cell 2 keeps stdout, computed stderr, stdout"


def test_folders_and_addresses_are_found():
    shown = notebook(f"in {tempfile.gettempdir()}/x", "<object at 0x7f00aabbccdd>", "0xff")
    assert comparing.private(shown) == [
        f"cell 2 shows {tempfile.gettempdir()}, which is of this machine",
        "cell 2 shows 0x7f00aabbccdd, which is of this machine",
    ]
