"""Results: one word for each column of each entry, and the tables made of them."""

import json

from tests.aot import outcome
from tests.aot.outcome import Row

ROWS = [
    Row("add", ("forward", "float64"), "pass", ""),
    Row("fft", ("forward",), "pass", ""),
    Row("fft", ("float64",), "pass", ""),
    Row("fft", ("float64",), "refused", "no FFT of c128[5,7]"),
    Row("fft", ("float64",), "refused", "something later"),
    Row("eig", ("forward",), "pass", ""),
    Row("eig", ("forward",), "host", ""),
    Row("eig", ("forward",), "pass", ""),
    Row("mode", ("forward",), "timeout", "not done after 120 s"),
]


def test_the_first_fault_of_a_column_holds():
    cells = outcome.cells_of(ROWS)
    assert cells["add"] == {"forward": "pass", "float64": "pass"}
    assert cells["fft"] == {"forward": "pass", "float64": "refused: no FFT of c128[5,7]"}
    assert cells["eig"] == {"forward": "host"}
    assert cells["mode"] == {"forward": "timeout: not done after 120 s"}


def test_shares_and_reasons():
    cells = {"v5e": outcome.cells_of(ROWS)}
    lines = outcome.summary(cells).splitlines()
    assert "| v5e | forward | 4 | 3 | 75.0% |" in lines
    assert "| v5e | float64 | 2 | 1 | 50.0% |" in lines
    assert outcome.refused(cells) == [
        "v5e: 1x refused: no FFT of c##: fft (float64)",
        "v5e: 1x timeout: not done after # s: mode (forward)",
    ]


def test_what_is_written_is_read(tmp_path):
    cells = {"v5e": outcome.cells_of(ROWS)}
    path = outcome.write(cells, {"v5e": {"libtpu": "0.0.52"}}, tmp_path / "results.json")
    found = outcome.read(path)
    assert found["targets"] == json.loads(json.dumps(cells))
    assert found["compilers"] == {"v5e": {"libtpu": "0.0.52"}}
    assert {"torch", "jax", "python"} <= set(found["versions"])
    assert len(found["date"]) == 10
    assert outcome.read(tmp_path / "nothing.json") == {"targets": {}}
