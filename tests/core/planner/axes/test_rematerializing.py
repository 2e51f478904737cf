"""What is computed again over a limit: kernels by hand, and what a compiler said."""

from isoshard.core.planner.axes.fused_kernels import FusedKernel
from isoshard.core.planner.axes.local_program import LocalOp, LocalProgram, LocalScope
from isoshard.core.planner.axes.rematerializing import computed_again

INPUT, ACTIVATION, HIDDEN, OTHER, RESULT = range(5)


def kernel(name, reads, writes, bodies=()):
    op = LocalOp(name, None, reads, writes, bodies=bodies)
    return FusedKernel(op, reads, writes, 0.0)


def forward_and_backward(first="sin", reads=(INPUT,)):
    """An activation that is read at once and at the end."""
    return [
        kernel(first, reads, (ACTIVATION,)),
        kernel("dot_general", (ACTIVATION,), (HIDDEN,)),
        kernel("dot_general", (HIDDEN,), (OTHER,)),
        kernel("dot_general", (OTHER, ACTIVATION), (RESULT,)),
    ]


def again(order, limit=250, fixed=(INPUT, RESULT), sizes=()):
    """The program, and its kernels over a limit; values have 100 bytes."""
    program = LocalProgram()
    for value in range(8):
        program.value((dict(sizes).get(value, 100),), 1, "uint8")
    return program, computed_again(program, order, set(fixed), limit, {})


def names(order):
    return [one.op.name for one in order]


def most_alive(program, order, fixed=(INPUT, RESULT)):
    """Bytes beside inputs and results."""
    last = {one: place for place, each in enumerate(order) for one in each.reads}
    alive, most = set(), 0
    for place, each in enumerate(order):
        alive |= {*each.writes} - {*fixed}
        most = max(most, sum(program.bytes[one] for one in alive))
        alive = {one for one in alive if last.get(one, -1) > place}
    return most


def test_below_the_limit_nothing_is():
    order = forward_and_backward()
    assert again(order, limit=300)[1] == order


def test_what_is_made_of_inputs_is_made_before_it_is_read_again():
    program, found = again(forward_and_backward())
    assert names(found) == ["sin", "dot_general", "dot_general", "sin", "dot_general"]
    assert found[3].reads == (INPUT,) and found[3].writes == found[4].reads[1:]
    assert found[3].writes != (ACTIVATION,)
    assert most_alive(program, forward_and_backward()) == 300
    assert most_alive(program, found) == 200


def test_an_activation_stays_if_the_product_it_is_made_of_is_gone():
    order = [kernel("dot_general", (INPUT,), (5,)), *forward_and_backward("tanh", (5,))]
    assert again(order)[1] == order


def test_it_is_made_again_if_the_product_is_there():
    order = [kernel("dot_general", (INPUT,), (5,)), *forward_and_backward("tanh", (5,))]
    order[-1] = kernel("dot_general", (OTHER, ACTIVATION, 5), (RESULT,))
    program, found = again(order, limit=350)
    assert names(found).count("tanh") == 2 and names(found).count("dot_general") == 4
    assert (most_alive(program, order), most_alive(program, found)) == (400, 300)


def test_of_what_is_gone_the_smaller_is_kept():
    order = [kernel("dot_general", (INPUT,), (5,)), *forward_and_backward("concatenate", (5,))]
    program, found = again(order, sizes={5: 20})
    assert names(found)[-2:] == ["concatenate", "dot_general"]
    assert most_alive(program, found) == 220


def test_products_results_and_what_loops_read_stay():
    order = forward_and_backward("dot_general")
    assert again(order)[1] == order
    order = forward_and_backward()
    assert again(order, fixed=(INPUT, RESULT, ACTIVATION), limit=150)[1] == order
    order[-1] = kernel("scan", (OTHER, ACTIVATION), (RESULT,), (LocalScope([], "scan", 4),))
    assert again(order)[1] == order


def test_what_is_made_over_the_limit_stays():
    early = kernel("dot_general", (INPUT,), (5,))
    late = kernel("dot_general", (RESULT, 5), (6,))
    order = [early, *forward_and_backward(), late]
    assert names(again(order, limit=350)[1]).count("sin") == 2
    assert again(order, limit=150)[1] == order


def test_what_nobody_has_read_yet_moves():
    order = [
        kernel("sin", (INPUT,), (ACTIVATION,)),
        kernel("dot_general", (INPUT,), (HIDDEN,)),
        kernel("dot_general", (HIDDEN,), (OTHER,)),
        kernel("dot_general", (OTHER, ACTIVATION), (RESULT,)),
    ]
    program, found = again(order)
    assert names(found) == ["dot_general", "dot_general", "sin", "dot_general"]
    assert most_alive(program, found) == 200
    assert names(again(order, limit=150)[1]) == names(found)
