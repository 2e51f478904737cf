"""What a compiled program sends, read off its HLO."""

import math
import re

import jax

_GATHER = re.compile(r"= (.*?) (?:all-gather|all-to-all)(?:-start)?\(")
_PERMUTE = re.compile(r"= (.*?) collective-permute(?:-start)?\(")
_REDUCE = re.compile(r"= (.*?) all-reduce(?:-start)?\(")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")


def compiled(function, *arguments):
    """The text of the program for these arguments."""
    return jax.jit(function).lower(*arguments).compile().as_text()


def gathered(text):
    """The elements of the largest result of an all-gather or all-to-all; 0 without any."""
    shapes = [shape for result in _GATHER.findall(text) for shape in _SHAPE.findall(result)]
    return max((math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes), default=0)


def sent(text):
    """The elements that a device receives in collective-permutes, one run of each."""
    shapes = [shape for result in _PERMUTE.findall(text) for shape in _SHAPE.findall(result)[:1]]
    return sum(math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes)


def summed(text):
    """The elements of the largest result of an all-reduce; 0 without any."""
    shapes = [shape for result in _REDUCE.findall(text) for shape in _SHAPE.findall(result)]
    return max((math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes), default=0)
