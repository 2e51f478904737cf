"""A picture of a trace: which module a device works for during one training step, as SVG.

    python -m benchmarks.trace_figure     # docs/trace.svg

A Llama of two layers is trained on eight virtual CPU devices under `xs.profile`; the events of
device 0 are drawn by the scopes that the trace has. A row is a module, a bar an operation.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

FIGURE = Path(__file__).resolve().parents[1] / "docs" / "trace.svg"
ROWS = (
    *("embed_tokens", "layers.0.self_attn", "layers.0.mlp", "layers.1.self_attn", "layers.1.mlp"),
    *("norm", "lm_head", "loss", "optimizer"),
)
COLORS = {"forward": "#3567b0", "backward": "#c4662c", "optimizer": "#3f8f53"}
WIDTH, LEFT, TOP, ROW = 900, 140, 44, 22


def traced_step() -> list[dict[str, Any]]:
    """The events of one step's operations."""
    import isoshard as iso

    iso.simulate_devices(8)
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import isoshard.torch_bridge as xs

    mesh = iso.make_mesh((2, 4), ("data", "model"))
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=1024,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()
    model = iso.shard(model, mesh, iso.Plan.from_hf_tp_plan(model, axis="model"))
    optimizer = torch.optim.AdamW(model.parameters())
    ids = iso.shard(torch.randint(0, 1024, (8, 64)), mesh, iso.P("data"))

    @xs.compile
    def train(ids: Any) -> Any:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(3):
        train(ids)
    with tempfile.TemporaryDirectory() as folder:
        with xs.profile(folder):
            train(ids)
        (path,) = Path(folder).rglob("perfetto_trace.json.gz")
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    named = [event for event in events if "op_name" in event.get("args", {})]
    return [event for event in named if event["args"].get("device_ordinal") == "0"]


def row_of(scope: str) -> str:
    """The row of an operation, by its scope without the compiled function."""
    scope = scope.removeprefix("backward/")
    if not scope.startswith("LlamaForCausalLM"):
        return "optimizer"
    path = scope.split("/")[1]
    inside = [row for row in ROWS if f".{row}" in f".{path}."]
    if inside:
        return inside[0]
    return f"{'.'.join(path.split('.')[1:3])}.mlp" if "layers." in path else "loss"


def draw(events: list[dict[str, Any]]) -> str:
    """Draw the events of one device.

    Returns:
        The SVG.
    """
    begin = min(event["ts"] for event in events)
    end = max(event["ts"] + event["dur"] for event in events)
    scale = (WIDTH - LEFT - 20) / (end - begin)
    height = TOP + len(ROWS) * ROW + 24
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        'aria-labelledby="title" font-family="Helvetica, Arial, sans-serif" font-size="11" '
        'fill="#222">',
        '<title id="title">What device 0 computes during a training step, by module</title>',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        '<text x="10" y="16" font-size="13">One training step of a Llama of two layers, device 0 '
        "of 8, by the scopes in the trace</text>",
    ]
    for index, (kind, color) in enumerate(COLORS.items()):
        x = LEFT + 110 * index
        out.append(f'<rect x="{x}" y="24" width="10" height="10" fill="{color}"/>')
        out.append(f'<text x="{x + 15}" y="33">{kind}</text>')
    for index, row in enumerate(ROWS):
        y = TOP + index * ROW
        out.append(f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(row)}</text>')
        out.append(f'<path d="M{LEFT} {y + ROW}H{WIDTH - 20}" stroke="#ddd"/>')
    for event in events:
        row = row_of(event["name"])
        backward = "backward" if event["name"].startswith("backward/") else "forward"
        color = COLORS["optimizer" if row == "optimizer" else backward]
        x, width = LEFT + (event["ts"] - begin) * scale, max(event["dur"] * scale, 0.6)
        y = TOP + ROWS.index(row) * ROW + 3
        out.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="16" fill="{color}"/>')
    bottom = TOP + len(ROWS) * ROW + 16
    out.append(f'<text x="{LEFT}" y="{bottom}">0</text>')
    milliseconds = f"{(end - begin) / 1000:.1f} ms"
    out.append(f'<text x="{WIDTH - 20}" y="{bottom}" text-anchor="end">{milliseconds}</text>')
    return "\n".join([*out, "</svg>", ""])


def main() -> int:
    """Trace a step, and draw it."""
    FIGURE.write_text(draw(traced_step()))
    print(FIGURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
