"""`torch.nn.GRU` as one loop of the compiled program over the time steps, by torch_xla's name.

>>> import torch, isoshard.torch_bridge
>>> gru = GRU(4, 8, num_layers=2).to("jax")
>>> output, last = gru(torch.ones(5, 3, 4, device="jax"))  # 5 steps, 3 sequences
>>> output.shape, last.shape
(torch.Size([5, 3, 8]), torch.Size([2, 3, 8]))

`torch.nn.GRU` itself runs on the device too, with every step written out: a program that grows with
the length. Parameters have the same names, so either loads the other's `state_dict`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from isoshard.torch_bridge.kit import naming, scan

__all__ = ["GRU"]


class GRU(torch.nn.GRU):
    """A gated recurrent unit whose steps are one loop; otherwise `torch.nn.GRU`.

    Packed sequences, both directions at once, and tensors on another device are left to
    `torch.nn.GRU`.

    Args:
        *args: as for `torch.nn.GRU`.
        **kwargs: likewise.

    Raises:
        RuntimeError: when called, if a shape does not fit.
    """

    def forward(self, input: Any, hx: torch.Tensor | None = None) -> Any:
        """The outputs of the last layer for every step, and the last hidden state of every layer.

        Args:
            input: (steps, batch, features), or (batch, steps, features) with `batch_first`; without
                a batch (steps, features).
            hx: (layers, batch, hidden) to start from, without a batch (layers, hidden); zeros if
                not given.
        """
        packed = isinstance(input, PackedSequence)
        if packed or self.bidirectional or input.device.type not in naming.OURS:
            return super().forward(input, hx)
        if input.dim() not in (2, 3):
            raise ValueError(f"GRU takes 2 or 3 axes (steps, batch, features), not {input.dim()}")
        if hx is not None and hx.dim() != input.dim():
            raise RuntimeError(
                f"hx has as many axes as the input, {input.dim()}, and this one has {hx.dim()}"
            )
        steps, first = input, hx
        if input.dim() == 2:
            steps, first = steps[:, None], None if first is None else first[:, None]
        elif self.batch_first:
            steps = steps.transpose(0, 1)
        if first is None:
            first = steps.new_zeros(self.num_layers, steps.shape[1], self.hidden_size)
        lengths: Any = None  # of sequences that are packed
        inputs = steps.transpose(0, 1) if self.batch_first else steps
        self.check_forward_args(inputs, first, lengths)
        last = []
        for layer in range(self.num_layers):
            state, steps = self._layer(layer, first[layer], steps)
            last.append(state)
            if self.dropout and layer < self.num_layers - 1:
                steps = functional.dropout(steps, self.dropout, self.training)
        states = torch.stack(last)
        if input.dim() == 2:
            return steps[:, 0], states[:, 0]
        return steps.transpose(0, 1) if self.batch_first else steps, states

    @property
    def weight_ih(self) -> list[torch.Tensor]:
        """The weights of the inputs, by layer; torch_xla's GRU once kept them so."""
        return self._by_layer("weight_ih")

    @property
    def weight_hh(self) -> list[torch.Tensor]:
        """The weights of the hidden states, by layer."""
        return self._by_layer("weight_hh")

    @property
    def bias_ih(self) -> list[torch.Tensor]:
        """The biases of the inputs, by layer; empty without biases."""
        return self._by_layer("bias_ih")

    @property
    def bias_hh(self) -> list[torch.Tensor]:
        """The biases of the hidden states, by layer; empty without biases."""
        return self._by_layer("bias_hh")

    def _by_layer(self, name: str) -> list[torch.Tensor]:
        named = dict(self.named_parameters())
        every = (f"{name}_l{layer}" for layer in range(self.num_layers))
        return [named[parameter] for parameter in every if parameter in named]

    def _layer(self, layer: int, first: torch.Tensor, steps: torch.Tensor) -> Any:
        """One layer: its last hidden state, and that after every step."""
        names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        into, across, shift, inner = (getattr(self, f"{name}_l{layer}", None) for name in names)
        assert into is not None and across is not None
        # What depends on the input alone is one product for all steps, before the loop.
        projected = functional.linear(steps, into, shift)

        def step(
            hidden: torch.Tensor, projected_input: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            to_reset, to_update, to_new = projected_input.chunk(3, -1)
            reset, update, new = functional.linear(hidden, across, inner).chunk(3, -1)
            reset, update = torch.sigmoid(to_reset + reset), torch.sigmoid(to_update + update)
            new = torch.tanh(to_new + reset * new)
            hidden = new + update * (hidden - new)
            return hidden, hidden

        return scan(step, first, projected)
