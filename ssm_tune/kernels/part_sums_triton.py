"""Sums over parts in Triton: several of them in one launch, each in the same order in every run."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl

from ssm_tune.kernels.devices import device_of
from ssm_tune.kernels.part_sums import Sum

_AT_ONCE = 4  # sums of a launch
# What a program has in registers, parts and columns: few columns where there are few, so that there are many programs.
_NARROW, _WIDE = (128, 16), (32, 64)
_WIDEST_NARROW = 65536  # columns


@triton.jit
def _add(parts, total, block, blocks, count, size, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """Of one matrix (count, size), a block of columns."""
    matrix = (block // blocks).to(tl.int64)
    column = block % blocks * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < size
    parts += matrix * count * size
    found = tl.zeros([PARTS, COLUMNS], tl.float32)
    for first in range(0, count, PARTS):
        part = first + tl.arange(0, PARTS)
        places = part[:, None].to(tl.int64) * size + column[None, :]
        found += tl.load(parts + places, mask=(part < count)[:, None] & inside[None, :], other=0.0)
    found = tl.sum(found, axis=0)
    tl.store(total + matrix * size + column, found.to(total.dtype.element_ty), mask=inside)


@triton.jit
def add_up_kernel(
    parts0, total0, blocks0, count0, size0, parts1, total1, blocks1, count1, size1,
    parts2, total2, blocks2, count2, size2, parts3, total3, blocks3, count3, size3,
    end0, end1, end2, PARTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """blocks: of columns, in a matrix. end: number of the program with which the next sum begins."""
    program = tl.program_id(0)
    if program < end0:
        _add(parts0, total0, program, blocks0, count0, size0, PARTS, COLUMNS)
    elif program < end1:
        _add(parts1, total1, program - end0, blocks1, count1, size1, PARTS, COLUMNS)
    elif program < end2:
        _add(parts2, total2, program - end1, blocks2, count2, size2, PARTS, COLUMNS)
    else:
        _add(parts3, total3, program - end2, blocks3, count3, size3, PARTS, COLUMNS)


def write_sums(sums: Sequence[Sum]) -> None:
    for begin in range(0, len(sums), _AT_ONCE):
        _write(sums[begin : begin + _AT_ONCE])


def _write(sums: Sequence[Sum]) -> None:
    arguments, programs = [], []
    parts_at_once, columns = _NARROW if max(each.parts.shape[-1] for each in sums) <= _WIDEST_NARROW else _WIDE
    for parts, total in sums:
        count, size = parts.shape[-2:]
        blocks = triton.cdiv(size, columns)
        arguments.append((parts, total, blocks, count, size))
        programs.append(sum(programs[-1:]) + total.numel() // size * blocks)
    missing = _AT_ONCE - len(sums)
    given = [*arguments, *arguments[-1:] * missing]
    ends = [*programs, *programs[-1:] * missing][: _AT_ONCE - 1]
    with device_of(sums[0].parts):
        add_up_kernel[(programs[-1],)](
            *(value for each in given for value in each), *ends, PARTS=parts_at_once, COLUMNS=columns, num_warps=4
        )
