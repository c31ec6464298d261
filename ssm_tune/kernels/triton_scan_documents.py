"""What the Triton kernels have to know about the documents of a batch: a byte a token, worked out once for all layers.

Nothing here waits for the device, and no shape depends on values.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from ssm_tune.kernels.reference import starts_and_padding

PLAIN, START, PADDING = 0, 1, 2
FLAGGED_TOKENS = 8  # tokens that share a flag

_found: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def find_codes(
    seq_idx: Tensor | None, batch: int, length: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None]:
    """codes (batch, padded), int8, and flags (batch, padded / 8), int32: which tokens are not plain, and which eight
    hold one; None where all are plain. Rows are filled up with padding. Kept as long as that very tensor lives
    unchanged."""
    if seq_idx is None:
        return (None, None) if length % FLAGGED_TOKENS == 0 else _encode(None, batch, length, device)
    kept = _found.get(seq_idx)
    version = None if seq_idx.is_inference() else seq_idx._version
    if kept is not None and version is not None and kept[0] == version:
        return kept[1]
    found = _encode(seq_idx, batch, length, device)
    if version is not None:
        _found[seq_idx] = (version, found)
    return found


def _encode(seq_idx: Tensor | None, batch: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    starts, padding = starts_and_padding(seq_idx, batch, length, device)
    codes = starts.to(torch.int8) * START + padding.to(torch.int8) * PADDING
    codes = F.pad(codes, (0, -length % FLAGGED_TOKENS), value=PADDING)
    flags = codes.view(batch, -1, FLAGGED_TOKENS).any(-1).to(torch.int32)
    return codes.contiguous(), flags.contiguous()
