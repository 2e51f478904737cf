"""The end of a program with gradients: a loss, and its derivatives."""

from __future__ import annotations

from tests.fuzz.builder import Builder


def finish(b: Builder) -> None:
    """Add up some results, and differentiate the sum."""
    known = b.tensors(lambda t: t.requires_grad)
    if not known:
        return
    chosen = known[-3:]
    terms = []
    for name in chosen:
        shape = b.scope[name].shape
        term = f"{name}.real" if b.scope[name].is_complex() else name
        if b.chance(50):
            term = f"({term} * data({b.seed()}, {tuple(shape)}, torch.float32).to(device))"
        terms.append(f"{term}.float().sum()")
    b.add(f"({' + '.join(terms)}).backward()")
