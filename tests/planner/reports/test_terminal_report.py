"""A report as text, at any width and in any encoding."""

import dataclasses
import io

import pytest
from rich.console import Console

from isoshard.planner.reports.report import CollectiveUse, LiveArray
from tests.planner.reports.sample_reports import GIB, UP, fitting, too_large


def shown(report, width=100, **options):
    console = Console(file=io.StringIO(), width=width, **options)
    report.show(console=console)
    return console.file.getvalue()


def lines_with(text, word):
    return [line for line in text.splitlines() if word in line]


def test_sections(capsys):
    text = shown(fitting())
    assert text.startswith(
        "train_step (torch) on v5e:16x16: data=16 x model=16, 256 devices, depth 'partition'\n"
        "plan Plan.fsdp('data') * Plan.tensor_parallel('model')\n"
        "fits, 10.4 GiB of 14.9 GiB (70 %)\n"
    )
    assert "Peak at llama.py:41 (forward): the largest arrays alive" in text
    assert lines_with(text, "dot_general")[0].split() == (
        ["256.0", "MiB", "dot_general", "bfloat16[8,4096,4096]", "llama.py:41", "(forward)"]
    )
    assert lines_with(text, "reduce-scatter")[0].split() == (
        ["reduce-scatter", "data", "64.0", "ms", "32", "54.0", "MiB", "llama.py:41", "(forward)"]
    )
    assert "56.0 TFLOP and 288.7 GiB moved; 47 % utilised, limited by compute" in text
    assert "assumed: collectives hide behind computing of the same layer" in text
    assert "assumed: a while loop is counted as one run" in text
    assert "→ model=16 (ici of 16, 90 GB/s): 4.0 GiB in 64.0 ms (all-reduce)" in text
    assert "- all is well" in text
    assert text.endswith("estimated in 3.40 s with jax 0.10.2, jaxlib 0.10.2\n")
    assert "▏" in lines_with(text, "buffers")[0]  # a little is a thin line
    assert "█" not in lines_with(text, "buffers")[0]
    assert "\x1b" not in text
    assert "\x1b[" in shown(fitting(), force_terminal=True, color_system="truecolor")
    fitting().show(width=90)
    assert capsys.readouterr().out.startswith("train_step (torch) on v5e:16x16")
    assert str(fitting()) == (
        "train_step on v5e:16x16 (data=16, model=16): fits, 10.4 GiB of 14.9 GiB (70 %); 606 ms, "
        "47 % utilised, limited by compute"
    )
    text = shown(too_large())
    assert "does not fit, 130.0 GiB is 55.5 GiB over the 74.5 GiB of a device (174 %)" in text
    assert "limited by collectives over data" in text


def test_bars_are_as_long_as_their_numbers():
    memory = dataclasses.replace(
        fitting().memory,
        parameters=2 * GIB,
        buffers=0,
        optimizer=4 * GIB,
        inputs=0,
        activations=2 * GIB,
        peak=8 * GIB,
        capacity=16 * GIB,
    )
    text = shown(fitting(memory=memory), width=32 + 64)
    bars = {line.split()[0]: line[23:] for line in text.splitlines() if "█" in line}
    counts = {name: drawn.count("█") for name, drawn in bars.items()}
    assert counts["parameters"] == counts["activations"] == 8
    assert (counts["optimizer"], counts["peak"], counts["capacity"]) == (16, 32, 64)
    starts = [bars[role].index("█") for role in ("parameters", "optimizer", "activations")]
    assert starts == [0, 8, 24]
    assert "inputs" not in bars


@pytest.mark.parametrize("width", [1, 10, 40, 72, 300])
@pytest.mark.parametrize("report", [fitting(), too_large()], ids=["fits", "too large"])
def test_every_width(report, width):
    text = shown(report, width)
    assert max(map(len, text.splitlines())) <= width
    if width >= 40:
        assert "10.4 GiB" in text or "130.0 GiB" in text


def test_an_encoding_without_blocks():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    fitting().show(console=Console(file=stream, width=80))
    stream.flush()
    text = stream.buffer.getvalue().decode("ascii")
    assert "####" in text and "> model=16" in text


def test_text_is_no_markup():
    live = LiveArray("[bold]x[/]", (2,), "float32", GIB, "a[red].py:1 (f)")
    memory = dataclasses.replace(fitting().memory, largest=(live,), peak_line="[/nothing]")
    report = fitting(step="[link]", memory=memory, advice=("[/]",), plan="P([x])")
    for width in (40, 100):
        text = shown(report, width)
        assert "[bold]x[/]" in text and "a[red].py:1 (f)" in text and "- [/]" in text


def test_long_tables_are_summed_up():
    uses = tuple(
        CollectiveUse("all-gather", ("data",), 1 << 20, 2, f"f.py:{n} (f)", 0.001 * n)
        for n in range(20)
    )
    live = tuple(LiveArray(f"x{n}", (1,), "int8", GIB, UP) for n in range(10))
    memory = dataclasses.replace(fitting().memory, largest=live)
    for width in (40, 100):
        text = shown(fitting(collectives=uses, memory=memory), width)
        assert "f.py:19 (f)" in text and "f.py:2 (f)" not in text
        assert "and 8 from 4 more lines: 6.00 ms" in text
        assert "and 2 smaller arrays: 2.0 GiB" in text


def test_an_empty_report():
    memory = dataclasses.replace(
        fitting().memory, peak=0, parameters=0, optimizer=0, activations=0, buffers=0, inputs=0,
        largest=(), capacity=0, peak_line="",
    )  # fmt: skip
    time = dataclasses.replace(
        fitting().time, compute=0, memory=0, busy=0, collectives={}, serial=0, overlapped=0
    )
    report = fitting(
        memory=memory, time=time, collectives=(), mesh={}, advice=(), timeline=(), versions={}
    )
    assert "No collectives: the devices do not talk" in shown(report)
    assert "<div" in report.to_html()
    assert str(report)
