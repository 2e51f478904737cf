"""Attention and rotary embeddings, against onnx's reference."""

import numpy as np

from tests.onnx_bridge.executor.operators.one_node import (
    Case,
    check,
    check_refused,
    floats,
    integers,
)

Q, K, V = floats(8, 4, 3, 6), floats(8, 4, 5, 6), floats(8, 4, 5, 2)
KG, VG = floats(8, 2, 5, 6), floats(8, 2, 5, 2)
FLAT = (floats(8, 3, 24), floats(8, 5, 12), floats(8, 5, 4))
HEADS = {"q_num_heads": 4, "kv_num_heads": 2}
MASK = integers(3, 5, low=0, high=2) > 0
MASK[0] = False
PAST = (floats(8, 4, 2, 6), floats(8, 4, 2, 2))
LENGTHS = integers(8, low=1, high=6)
BATCH, HEAD = {0: 0, 1: 0, 2: 0}, {0: 1, 1: 1, 2: 1}
MANY = (floats(1, 8, 3, 6), floats(1, 8, 5, 6), floats(1, 8, 5, 6))


def attention(inputs, attributes=(), opset=23, **more):
    return Case(
        "Attention", tuple(inputs), dict(attributes), opset=opset, oracle="reference", **more
    )


def rotary(inputs, attributes=(), **more):
    return Case(
        "RotaryEmbedding", tuple(inputs), dict(attributes), opset=23, oracle="reference", **more
    )


ROTARY = (floats(8, 2, 3, 6), floats(10, 3), floats(10, 3), integers(8, 3, low=0, high=10))

CASES = [
    attention((Q, K, V), split=BATCH),
    attention(MANY, {"is_causal": 1}, split=HEAD, note="heads split, causal"),
    attention((Q, KG, VG), {"scale": 0.3}, note="shared heads"),
    attention(FLAT, HEADS, split=BATCH, note="three axes"),
    attention((Q, K, V, MASK), note="bool mask, a row unseen", gradient=True),
    attention((Q, K, V, floats(8, 1, 3, 5)), {"is_causal": 1}, note="float mask, causal"),
    attention((Q, K, V, MASK[:, :4]), opset=24, note="short mask"),
    attention((Q, K, V, MASK, *PAST), {"is_causal": 1}, outputs=3, note="past",
              opset=24),
    *(
        attention((Q, K, V, floats(3, 5)),
                  {"qk_matmul_output_mode": mode, **({"softcap": 2.0} if mode else {})},
                  outputs=4, note=f"mode {mode}", opset=24)
        for mode in range(4)
    ),
    attention((Q, K, V, None, None, None, LENGTHS), {"is_causal": 1}, 24, note="valid keys"),
    attention((Q, K, V), {"is_causal": 1, "left_window_size": 1}, 25, note="window"),
    attention((Q, K, V), {"left_window_size": 0, "right_window_size": 1}, 25, note="window ahead"),
    attention((x.astype(np.float16) for x in (Q, K, V)), {"softmax_precision": 1}, opset=24,
              tolerance=4e-3, note="float16"),
    rotary(ROTARY, split={0: 0, 3: 0}),
    rotary(ROTARY, {"interleaved": 1}, note="interleaved"),
    rotary((floats(8, 3, 12), *ROTARY[1:]), {"num_heads": 2}, split={0: 0}, note="three axes"),
    rotary((floats(8, 2, 3, 6), floats(8, 3, 2), floats(8, 3, 2)), {"rotary_embedding_dim": 4},
           note="a part, no ids"),
]  # fmt: skip


def test_they_compute_what_onnx_says():
    check(CASES)


REFUSED = [
    (attention(FLAT), "inputs of three axes need q_num_heads and kv_num_heads"),
    (attention((Q, K, V, None, PAST[0])), "past_key and past_value must both be"),
    (attention((Q, floats(8, 3, 5, 6), floats(8, 3, 5, 6))), "4 heads of queries do not share"),
    (attention((Q, K, V), {"qk_matmul_output_mode": 4}), r"mode is 4; possible are 0\.\.3"),
    (rotary((floats(8, 3, 12), *ROTARY[1:])), "an input of three axes needs num_heads"),
]  # fmt: skip


def test_what_cannot_be_computed_raises():
    check_refused(REFUSED)
