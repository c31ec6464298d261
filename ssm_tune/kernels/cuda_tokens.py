"""What the kernels in CUDA C++ are given: tensors of tokens, vectors, and where documents begin (`cuda/tokens.cuh`)."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from ssm_tune.kernels.reference import starts_and_padding

TILE = 16  # tokens whose marks are one number
ELEMENTS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
MOST_ROWS = 65535  # of a grid

_found: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def find_marks(seq_idx: Tensor) -> Tensor:
    """(batch, tiles), int32: of every 16 tokens which are a document's first, in the lower half of the bits, and which
    are padding. Without waiting for the device; kept as long as that very tensor lives unchanged."""
    version = None if seq_idx.is_inference() else seq_idx._version
    kept = _found.get(seq_idx)
    if kept is not None and version is not None and kept[0] == version:
        return kept[1]
    batch, length = seq_idx.shape
    starts, padding = (
        F.pad(mask, (0, -length % TILE)).view(batch, -1, TILE)
        for mask in starts_and_padding(seq_idx, batch, length, seq_idx.device)
    )
    bits = 1 << torch.arange(2 * TILE, device=seq_idx.device)
    marks = (torch.cat([starts, padding], dim=-1) * bits).sum(-1).to(torch.int32)
    if version is not None:
        _found[seq_idx] = (version, marks)
    return marks


class Tokens(ctypes.Structure):
    """As in cuda/tokens.cuh."""

    _fields_ = (("data", ctypes.c_void_p), ("row", ctypes.c_longlong), ("token", ctypes.c_int))


def structure(name: str, tokens: str, pointers: str, longs: str, ints: str) -> type[ctypes.Structure]:
    """The arguments of a kernel: the names of its tensors of tokens, its pointers and numbers, in this order."""
    kinds = ((tokens, Tokens), (pointers, ctypes.c_void_p), (longs, ctypes.c_longlong), (ints, ctypes.c_int))
    fields = [(field, kind) for names, kind in kinds for field in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def pointer(tensor: Tensor | None) -> int | None:
    """Its address; None for none."""
    return None if tensor is None else tensor.data_ptr()


def tokens_of(tensor: Tensor | None) -> Tokens:
    """Where (batch, length, dim) lies; strides are counted in bytes."""
    if tensor is None:
        return Tokens()
    row, token, _ = tensor.stride()
    return Tokens(tensor.data_ptr(), row * tensor.element_size(), token * tensor.element_size())


def aligned(tensor: Tensor) -> Tensor:
    """The tensor with channels side by side, every four of them at once readable; rows and tokens may be apart, as in
    a part of a projection."""
    row, token, channel = tensor.stride()
    apart = (row if tensor.shape[0] > 1 else 0) | (token if tensor.shape[1] > 1 else 0)
    if channel == 1 and apart % 4 == 0 and tensor.data_ptr() % (4 * tensor.element_size()) == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float32, contiguous, every four numbers at once readable."""
    tensor = tensor.detach().float().contiguous()
    return tensor if tensor.data_ptr() % 16 == 0 else tensor.clone()
