"""Run by test_onnx_files: small models that ask for values of absurd size, and unknown operators.

Each is checked and compiled under a limit of memory; what is printed is who refused it.
"""

import warnings

import onnx
from onnx import TensorProto, helper

import isoshard as iso
from isoshard.onnx_bridge import compile, validate
from tests.fuzz import onnx_files, onnx_seeds

N = helper.make_node


def whole(name, *values):
    return helper.make_tensor(name, TensorProto.INT64, [len(values)], values)


def one(name, value):
    return helper.make_tensor(name, TensorProto.INT64, [], [value])


def doubled(times):
    pairs = [N("Concat", [f"d{n}"] * 2, [f"d{n + 1}"], axis=0) for n in range(times)]
    return [*pairs, N("Cast", [f"d{times}"], ["y"], to=TensorProto.FLOAT)]


def as_float(node):
    return [node, N("Cast", [node.output[0]], ["y"], to=TensorProto.FLOAT)]


HUGE = 1 << 40
RANGE = [one("a", 0), one("b", 1 << 60), one("c", 1)]
ONE_HOT = [whole("i", 1), whole("d", 1 << 50), whole("v", 0, 1)]
CASES = {
    "fill": ([N("ConstantOfShape", ["s"], ["y"])], [whole("s", HUGE, 1 << 10)]),
    "range": (as_float(N("Range", ["a", "b", "c"], ["e"])), RANGE),
    "expand": ([N("Expand", ["x", "s"], ["y"])], [whole("s", HUGE, 4, 8)]),
    "tile": ([N("Tile", ["x", "s"], ["y"])], [whole("s", HUGE, 1)]),
    "pad": ([N("Pad", ["x", "s"], ["y"])], [whole("s", 0, 0, HUGE, 0)]),
    "one hot": ([N("OneHot", ["i", "d", "v"], ["y"])], ONE_HOT),
    "expand a constant": (
        as_float(N("Expand", ["i", "s"], ["e"])),
        [whole("i", 1), whole("s", HUGE)],
    ),
    "tile a constant": (
        as_float(N("Tile", ["i", "s"], ["e"])),
        [whole("i", 1, 2), whole("s", HUGE)],
    ),
    "pad a constant": (as_float(N("Pad", ["i", "s"], ["e"])), [whole("i", 1), whole("s", 0, HUGE)]),
    "doubled": (doubled(50), [whole("d0", 1, 2)]),
    "unknown": ([N("Nothing", ["x"], ["y"]), N("Other", ["x"], ["z"], domain="mine")], []),
}


def model(nodes, weights):
    relu = N("Relu", ["x"], ["r"], name="relu")
    onnx_seeds._annotate(relu, 0, x=([0, 1], 1, 2))
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    inputs, outputs = [onnx_seeds._value("x", 4, 8)], [onnx_seeds._value("r", 4, 8), result]
    return onnx_seeds._model([relu, *nodes], inputs, outputs, weights)


def main():
    warnings.simplefilter("ignore")
    iso.simulate_devices(8)
    compile(onnx_seeds.seeds()[0])  # loads everything before the limit
    onnx_files._limit_memory()
    for name, (nodes, weights) in CASES.items():
        made = model(nodes, weights)
        try:
            validate(onnx.ModelProto.FromString(made.SerializeToString()))
            compile(made)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}")
        else:
            print(f"{name}: compiled")


main()
