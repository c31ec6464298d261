"""The causal convolution in whole-row operations of plain PyTorch: any device, any floating dtype, autograd."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ssm_tune.kernels.reference import starts_and_padding


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = "silu",
    seq_idx: Tensor | None = None,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """The operation of `ssm_tune.kernels.causal_conv1d`: PyTorch's convolution, or, where documents share a row, a
    sum over the tokens that each token sees."""
    batch, length, dim = x.shape
    width = weight.shape[-1]
    wide = torch.promote_types(x.dtype, torch.float32)
    state = x.new_zeros(batch, dim, width - 1) if initial_state is None else initial_state
    rows = torch.cat([state.transpose(1, 2), x.to(state.dtype)], dim=1)
    if seq_idx is None:
        weight, bias = weight.to(wide), None if bias is None else bias.to(wide)
        y = F.conv1d(rows.to(wide).transpose(1, 2), weight[:, None], bias, groups=dim).transpose(1, 2)
        final_state = rows[:, length:].transpose(1, 2)
    else:
        places, seen = visible_rows(seq_idx, width)
        y = 0 if bias is None else bias.to(wide)
        for back in range(width):
            row = rows.gather(1, places[:, :-1, back, None].expand(-1, -1, dim))
            row = row.masked_fill(~seen[:, :-1, back, None], 0.0)
            y = y + row.to(wide) * weight[:, width - 1 - back].to(wide)
        newest_last = places[:, -1, 1:].flip(1), seen[:, -1, 1:].flip(1)
        final_state = rows.gather(1, newest_last[0][..., None].expand(-1, -1, dim))
        final_state = final_state.masked_fill(~newest_last[1][..., None], 0.0).transpose(1, 2)
    y = F.silu(y) if activation == "silu" else y
    if seq_idx is not None:
        y = y.masked_fill((seq_idx == -1)[..., None], 0.0)
    return (y.to(x.dtype), final_state) if return_final_state else y.to(x.dtype)


def visible_rows(seq_idx: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The rows that each token's window holds, in a table of the `width` - 1 rows of the state and then the tokens.

    Returns two tensors (batch, length + 1, width): the place of the token itself, of the real token before it, and so
    on; and whether that row is of the same document. The last line is for a token that would follow, in the last
    document: without its first entry it is the window that remains.
    """
    batch, length = seq_idx.shape
    starts, padding = starts_and_padding(seq_idx, batch, length, seq_idx.device)
    head = width - 1
    real = F.pad(~padding, (head, 0), value=True)
    # The rows that are real, first; a row's rank among them is the number of real rows up to it.
    places = torch.argsort((~real).to(torch.uint8), dim=1, stable=True)
    rank = real.cumsum(1)[:, head:] - 1
    document = F.pad(starts.cumsum(1), (head, 0))
    rank = torch.cat([rank, rank[:, -1:] + 1], dim=1)
    own_document = torch.cat([document[:, head:], document[:, -1:]], dim=1)
    ranks = (rank[..., None] - torch.arange(width, device=seq_idx.device)).clamp(min=0)
    ranks = ranks.clamp(max=places.shape[1] - 1)
    found = places.gather(1, ranks.flatten(1)).view_as(ranks)
    return found, document.gather(1, found.flatten(1)).view_as(found) == own_document[..., None]


def remaining_rows(x: Tensor, seq_idx: Tensor | None, initial_state: Tensor | None, width: int) -> Tensor:
    """The final state, (batch, dim, width - 1): a plain selection of rows, so that autograd knows its gradient."""
    batch, length, dim = x.shape
    state = x.new_zeros(batch, dim, width - 1) if initial_state is None else initial_state
    if seq_idx is None:
        last = x[:, max(0, length - (width - 1)) :].transpose(1, 2).to(state.dtype)
        return torch.cat([state, last], dim=-1)[..., state.shape[-1] + last.shape[-1] - (width - 1) :]
    places, seen = (part[:, -1, 1:].flip(1) for part in visible_rows(seq_idx, width))
    rows = torch.cat([state.transpose(1, 2), x.to(state.dtype)], dim=1)
    return rows.gather(1, places[..., None].expand(-1, -1, dim)).masked_fill(~seen[..., None], 0.0).transpose(1, 2)
