"""Greedy decoding and sampling of `transformers`, with the forward pass as a captured program.

The tokens, the logits processors and the stopping criteria are on the CPU, as `transformers` has
them; the model, its cache and the likeliest token are on the device. Where nothing on the CPU needs
the logits, the next token is fed back on the device, and the host reads it while the device is busy
with the token after it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ._transformers_internals import PAD_TOKEN
from .decoder import Decoder, on_host


def decode(
    decoder: Decoder,
    input_ids: torch.Tensor,
    *,
    positions: torch.Tensor,
    mask: torch.Tensor,
    processors: Any,
    criteria: Any,
    config: Any,
    streamer: Any,
) -> Any:
    """Generate tokens after a prompt.

    Args:
        decoder: whose cache holds the prompt and all new tokens.
        input_ids: the prompt, integers of shape (rows, length), on the CPU.
        positions: of the tokens in the prompt, of the same shape.
        mask: 1 where there is a token, of the same shape.
        processors: of the logits, a `LogitsProcessorList`.
        criteria: a `StoppingCriteriaList`.
        config: a prepared `GenerationConfig`.
        streamer: gets the new tokens; None for none.

    Returns:
        The prompt with the new tokens, or a `GenerateDecoderOnlyOutput`, as `generate` returns.
    """
    rows = len(input_ids)
    records = config.return_dict_in_generate
    reads_logits = bool(
        config.do_sample
        or len(processors)
        or (records and (config.output_scores or config.output_logits))
    )
    is_own = all(type(x) in (MaxLengthCriteria, EosTokenCriteria) for x in criteria)
    may_run_ahead = is_own and not reads_logits
    checked = not (may_run_ahead and streamer is None)
    pad = getattr(config, PAD_TOKEN.attribute)
    has_eos = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
    most = criteria.max_length
    scores: Any = () if records and config.output_scores else None
    raw_logits: Any = () if records and config.output_logits else None
    unfinished = torch.ones(rows, dtype=torch.long)

    logits, tokens = decoder.prefill(input_ids, positions, mask)
    while True:
        ahead = None
        if may_run_ahead and (most is None or input_ids.shape[1] + 1 < most):
            ahead = decoder.decode(tokens, checked=checked)
        if reads_logits:
            next_logits = on_host(logits)[:rows]
            next_scores = processors(input_ids, next_logits)
            scores = None if scores is None else (*scores, next_scores)
            raw_logits = None if raw_logits is None else (*raw_logits, next_logits)
            if config.do_sample:
                probabilities = torch.nn.functional.softmax(next_scores, dim=-1)
                next_tokens = torch.multinomial(probabilities, num_samples=1).squeeze(1)
            else:
                next_tokens = torch.argmax(next_scores, dim=-1)
        else:
            next_tokens = on_host(tokens)[:rows, 0].long()
        if has_eos:
            next_tokens = next_tokens * unfinished + pad * (1 - unfinished)
        input_ids = torch.cat([input_ids, next_tokens[:, None]], dim=-1)
        if streamer is not None:
            streamer.put(next_tokens)
        unfinished = unfinished & ~criteria(input_ids, scores)
        if not unfinished.any():
            if ahead is not None:  # the caller's cache does not hold the token after the end
                decoder.cache.crop(-1)
            break
        logits, tokens = ahead or decoder.decode(
            next_tokens[:, None] if reads_logits else tokens, checked=checked
        )
    if streamer is not None:
        streamer.end()
    if not records:
        return input_ids
    return GenerateDecoderOnlyOutput(
        sequences=cast(Any, input_ids),
        scores=scores,
        logits=raw_logits,
        past_key_values=decoder.cache,
    )
