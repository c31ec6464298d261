"""What attention layers have to know about documents and padding: positions, and a mask by transformers' own makers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import create_causal_mask

from ssm_tune.families import MASKED_ATTENTION
from ssm_tune.mixers.documents import document_numbers, document_positions


def mask_documents(config: Any, index: Tensor, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """A causal mask that keeps every document of `index` (batch, length) to itself, as the config's attention takes it.

    `window`: how many of its document's last tokens a token sees; None: all of them.

    Raises:
        ValueError: an attention that is not known to take such a mask.
    """
    if config._attn_implementation not in MASKED_ATTENTION:
        raise ValueError(
            f"attn_implementation={config._attn_implementation!r} is not known to keep packed documents apart in "
            f"{config.model_type}. Load the model with attn_implementation='sdpa', or do not pack."
        )
    numbers, positions = document_numbers(index), document_positions(index)

    def is_seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = numbers[row, query] == numbers[row, key]
        return same if window is None else same & (positions[row, key] > positions[row, query] - window)

    embeds = torch.empty((*index.shape, 0), dtype=dtype, device=index.device)  # only shape, dtype and device count
    return create_causal_mask(config, embeds, attention_mask=None, cache=None, and_mask_function=is_seen)


def positions_of_row(shape: tuple[int, int], device: torch.device, seen: int, mask: Tensor | None) -> Tensor:
    """Positions of the tokens after `seen` others, (batch or 1, length): the number of real ones before each, if the
    mask (batch, all tokens) tells of all.
    """
    if mask is None or mask.shape[1] != seen + shape[1]:
        return torch.arange(shape[1], device=device)[None] + seen
    return ((mask != 0).to(device).cumsum(1) - 1).clamp(min=0)[:, seen:]


def holds_inner_padding(real: Tensor) -> bool:
    """Whether padding stands between tokens in any row of `real` (batch, length) bool (waits for the device)."""
    before = real.cumsum(1)
    return bool((~real & (before > 0) & (before < before[:, -1:])).any())


def padding_mask(attention_mask: Any) -> Tensor | None:
    """The mask of padding (batch, length): itself, or the one among those that generate prepares by kind of layer.

    Raises:
        ValueError: a mask of another shape, by which attention could go, and nothing else.
    """
    if isinstance(attention_mask, dict):
        return attention_mask.get("linear_attention", attention_mask.get("conv"))
    if isinstance(attention_mask, Tensor) and attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask is {tuple(attention_mask.shape)}: only attention could go by it, the state-space layers "
            "would let documents and padding through. Give padding as (batch, length), and documents by seq_idx."
        )
    return attention_mask if isinstance(attention_mask, Tensor) else None
