"""The kernels of the Triton scan of Mamba-2 that compute the gradients of one chunk; see `triton_ssd_backward`.

Two of them: sums over heads are kept in registers, and those of one kernel leave no room for those of the other, nor
for what it computes; spilled, they took 1.7 times as long. Tiles of pairs of tokens are (j, i): turned so that the sums
over i, for x and B, are products of matrices whose first factor is in registers. Where the loop over heads says how
many are on their way, Triton fetches all that is read ahead, and not only factors of products.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ssm_tune.kernels.triton_ssd_common import read_tokens, write_tokens

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def place_of_program(program, parts, groups, batch):
    """Part, group, row and chunk of a program: chunk by chunk, so that all rows are at the same."""
    part, program = program % parts, program // parts
    group, program = program % groups, program // groups
    return part.to(tl.int64), group.to(tl.int64), (program % batch).to(tl.int64), program // batch


@triton.jit
def read_head(
    source, row, head, token, first, place, remaining, width, token_stride, head_stride,
    TOKENS: tl.constexpr, HEAD_DIM: tl.constexpr, EVEN: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """HEAD_DIM channels, from `first` on, of the tokens of a chunk that begins at `token`.

    source: where the first head's channels of that token are, or, if COPIED, `tiles_of_tokens`.
    """
    if COPIED:
        tile = source.load([row.to(tl.int32), tl.cast(head, tl.int32), token, first])
        tile = tl.reshape(tile, [TOKENS, HEAD_DIM])
    else:
        p = first + tl.arange(0, HEAD_DIM)
        tile = read_tokens(source + head * head_stride, place, p, remaining, width, token_stride, EVEN)
    return tile


@triton.jit(do_not_specialize=["batch", "length", "heads", "chunks", "heads_each", "parts", "state_blocks"])
def across_chunks_kernel(
    dy, x, C, step, decay, reach, states, dstates, dB, dC, by_decay, carried,
    batch, length, heads, chunks, heads_of_group, heads_each, parts, head_dims, state_dims, state_blocks,
    dy_row, dy_token, dy_head, x_row, x_token, x_head, C_row, C_token, C_group,
    to_part, to_row, to_token, to_group,
    CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr,
    HAS_DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """What the state before a chunk and the one after it give, for `heads_each` heads of a group and STATE states.

    dB, dC: the gradients as far as they come from these states. by_decay: (blocks of states, batch, heads, chunks,
    CHUNK), the like for the sums of step * A, from the state before. carried: (blocks of states, batch, heads, chunks),
    the gradient of the sum to the end of the chunk by what goes through from the one state to the other. Grid: (chunks
    * batch * groups * parts * blocks of states,).
    """
    program, block_of_states = tl.program_id(0) // state_blocks, tl.program_id(0) % state_blocks
    part, group, row, chunk = place_of_program(program, parts, heads // heads_of_group, batch)
    place, n = tl.arange(0, CHUNK), block_of_states * STATE + tl.arange(0, STATE)
    of_states = block_of_states.to(tl.int64) * batch * heads * chunks
    start, remaining = chunk.to(tl.int64) * CHUNK, length - chunk * CHUNK
    C += row * C_row + group * C_group + start * C_token
    c = read_tokens(C, place, n, remaining, state_dims, C_token, EVEN)
    if HAS_DOCUMENTS:
        reach += (row * chunks + chunk) * CHUNK
        from_before = tl.load(reach + place) < 0
        to_the_end = place >= tl.load(reach + CHUNK - 1)
        all_through = tl.load(reach + CHUNK - 1) < 0
    total_B, total_C = tl.zeros([CHUNK, STATE], tl.float32), tl.zeros([CHUNK, STATE], tl.float32)
    x += row * x_row + start * x_token
    dy += row * dy_row + start * dy_token
    first = group * heads_of_group + part * heads_each
    end = tl.minimum(first + heads_each, (group + 1) * heads_of_group)
    for head in tl.range(first, end, num_stages=STAGES):
        of_chunk = (row * heads + head) * chunks + chunk
        tokens = of_chunk * CHUNK + place
        decays, total = tl.load(decay + tokens), tl.load(decay + of_chunk * CHUNK + CHUNK - 1)
        fading, kept, reaching = tl.exp(decays), tl.exp(total), tl.exp(total - decays) * tl.load(step + tokens)
        if HAS_DOCUMENTS:
            fading = tl.where(from_before, fading, 0.0)
            reaching = tl.where(to_the_end, reaching, 0.0)
            kept = tl.where(all_through, kept, 0.0)
        tile = of_chunk * state_dims * head_dims
        read, through = tl.zeros([CHUNK], tl.float32), 0.0
        for block in tl.static_range(BLOCKS):
            p = block * HEAD_DIM + tl.arange(0, HEAD_DIM)
            slope = read_tokens(dy + head * dy_head, place, p, remaining, head_dims, dy_token, EVEN)
            state = read_tokens(states + tile, n, p, state_dims, head_dims, head_dims, EVEN)
            dstate = read_tokens(dstates + tile, n, p, state_dims, head_dims, head_dims, EVEN)
            faded = (slope.to(tl.float32) * fading[:, None]).to(slope.dtype)
            values = read_tokens(x + head * x_head, place, p, remaining, head_dims, x_token, EVEN)
            entering = (values.to(tl.float32) * reaching[:, None]).to(values.dtype)
            total_B = tl.dot(entering, tl.trans(dstate), acc=total_B, input_precision=PRECISION)
            total_C = tl.dot(faded, tl.trans(state), acc=total_C, input_precision=PRECISION)
            out = tl.dot(c, state, input_precision=PRECISION)
            read += tl.sum(out * slope.to(tl.float32), axis=1)
            if HEAD_DIM >= 64:
                # The sum of all products is the trace of a matrix that the tensor cores make.
                both = tl.dot(tl.trans(state), dstate, input_precision=PRECISION)
                through += tl.sum(tl.where(p[:, None] == p[None, :], both, 0.0))
            else:
                through += tl.sum(state.to(tl.float32) * dstate.to(tl.float32))
        tl.store(by_decay + of_states * CHUNK + tokens, read * fading)
        tl.store(carried + of_states + of_chunk, through * kept)
    to = part * to_part + row * to_row + group * to_group + start * to_token
    write_tokens(dC + to, total_C, place, n, remaining, state_dims, to_token, EVEN)
    write_tokens(dB + to, total_B, place, n, remaining, state_dims, to_token, EVEN)


@triton.jit(do_not_specialize=["batch", "length", "heads", "chunks", "heads_each", "parts"])
def within_chunk_kernel(
    dy, x, B, C, D, step, decay, reach, dstates, first_B, first_C, dx, dB, dC, by_step, by_decay, sent, by_skip,
    batch, length, heads, chunks, heads_of_group, heads_each, parts, head_dims, state_dims,
    dy_row, dy_token, dy_head, x_row, x_token, x_head, B_row, B_token, B_group, C_row, C_token, C_group,
    D_head, D_channel, dx_row, dx_token, dx_head,
    first_row, first_token, first_group, dB_part, dB_row, dB_token, dB_group, dC_part, dC_row, dC_token, dC_group,
    CHUNK: tl.constexpr, HEAD_DIM: tl.constexpr, STATE: tl.constexpr, BLOCKS: tl.constexpr, EVEN: tl.constexpr,
    HAS_D: tl.constexpr, WIDE_D: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
    STAGES: tl.constexpr, WHOLE: tl.constexpr, COPIED: tl.constexpr,
):  # fmt: skip
    """What tokens give each other, and to the state after the chunk, for `heads_each` heads of a group.

    If COPIED, dy, x and dx are `tiles_of_tokens` and dstates `tiles_of_states` of `triton_ssd_forward_tma`, which take
    no registers for addresses.

    dB, dC: the gradients as far as they come from within the chunk, in parts; if WHOLE, with those of the other kernel,
    first_B and first_C, added: all of them. by_step: (batch, heads, chunks, CHUNK), the gradients of the steps.
    by_decay: (batch, heads, chunks, CHUNK / 16, CHUNK), those of the sums of step * A where tokens see others, in
    shares of 16 of these, whose sum would cross warps (where tokens are seen, it is that of the step, times the step,
    taken off). sent: (batch, heads, chunks, CHUNK), what goes, times the step, to the end of the chunk. by_skip: what
    tokens, or, if D is wide, channels (batch, heads, chunks, head_dim), give the gradient of D. Grid: (chunks * batch *
    groups * parts,).
    """
    part, group, row, chunk = place_of_program(tl.program_id(0), parts, heads // heads_of_group, batch)
    chunk = chunks - 1 - chunk  # what the other kernel has read last is in the cache
    place, n = tl.arange(0, CHUNK), tl.arange(0, STATE)
    start, remaining = chunk.to(tl.int64) * CHUNK, length - chunk * CHUNK
    B += row * B_row + group * B_group + start * B_token
    C += row * C_row + group * C_group + start * C_token
    b = read_tokens(B, place, n, remaining, state_dims, B_token, EVEN)
    c = read_tokens(C, place, n, remaining, state_dims, C_token, EVEN)
    seen = place[:, None] <= place[None, :]
    if HAS_DOCUMENTS:
        reach += (row * chunks + chunk) * CHUNK
        seen = seen & (place[:, None] >= tl.load(reach + place)[None, :])
        to_the_end = place >= tl.load(reach + CHUNK - 1)
    scores = tl.where(seen, tl.dot(b, tl.trans(c), input_precision=PRECISION), 0.0)
    pairs = tl.zeros([CHUNK, CHUNK], tl.float32)
    if not COPIED:
        dy += row * dy_row + start * dy_token
        x += row * x_row + start * x_token
        dx += row * dx_row + start * dx_token
    first = group * heads_of_group + part * heads_each
    end = tl.minimum(first + heads_each, (group + 1) * heads_of_group)
    for head in tl.range(first, end, num_stages=STAGES):
        of_chunk = (row * heads + head) * chunks + chunk
        tokens = of_chunk * CHUNK + place
        steps, decays = tl.load(step + tokens), tl.load(decay + tokens)
        reaching = tl.exp(tl.load(decay + of_chunk * CHUNK + CHUNK - 1) - decays)
        if HAS_DOCUMENTS:
            reaching = tl.where(to_the_end, reaching, 0.0)
        agreement = tl.zeros([CHUNK, CHUNK], tl.float32)
        for block in tl.static_range(BLOCKS):
            p = block * HEAD_DIM + tl.arange(0, HEAD_DIM)
            slope = read_head(
                dy, row, head, chunk * CHUNK, block * HEAD_DIM, place, remaining, head_dims, dy_token, dy_head,
                CHUNK, HEAD_DIM, EVEN, COPIED,
            )  # fmt: skip
            values = read_head(
                x, row, head, chunk * CHUNK, block * HEAD_DIM, place, remaining, head_dims, x_token, x_head,
                CHUNK, HEAD_DIM, EVEN, COPIED,
            )  # fmt: skip
            agreement = tl.dot(values, tl.trans(slope), acc=agreement, input_precision=PRECISION)
        if HAS_D and not WIDE_D:
            same = tl.where(place[:, None] == place[None, :], agreement, 0.0)
            tl.store(by_skip + tokens, tl.sum(same, axis=1))
        binary = decays * _LOG2_E
        # Where j is not seen the exponent may be large; `seen` comes with the scores, and to the pairs at the end.
        weights = tl.exp2(tl.minimum(binary[None, :] - binary[:, None], 0.0))
        agreement *= weights
        pairs += agreement * steps[:, None]
        agreement *= scores
        mixing = (scores * weights).to(b.dtype)
        direct = tl.sum(agreement, axis=1)
        share = tl.arange(0, CHUNK // 16)[:, None] * CHUNK + place[None, :]
        agreement = tl.reshape(agreement * steps[:, None], [CHUNK // 16, 16, CHUNK])
        tl.store(by_decay + of_chunk * (CHUNK // 16 * CHUNK) + share, tl.sum(agreement, axis=1))
        brought = tl.zeros([CHUNK], tl.float32)
        for block in tl.static_range(BLOCKS):
            p = block * HEAD_DIM + tl.arange(0, HEAD_DIM)
            some = p < head_dims
            if BLOCKS > 1:
                slope = read_head(
                    dy, row, head, chunk * CHUNK, block * HEAD_DIM, place, remaining, head_dims, dy_token, dy_head,
                    CHUNK, HEAD_DIM, EVEN, COPIED,
                )  # fmt: skip
                values = read_head(
                    x, row, head, chunk * CHUNK, block * HEAD_DIM, place, remaining, head_dims, x_token, x_head,
                    CHUNK, HEAD_DIM, EVEN, COPIED,
                )  # fmt: skip
            if COPIED:
                dstate = dstates.load([of_chunk.to(tl.int32), 0, block * HEAD_DIM]).reshape(STATE, HEAD_DIM)
            else:
                tile = dstates + of_chunk * state_dims * head_dims
                dstate = read_tokens(tile, n, p, state_dims, head_dims, head_dims, EVEN)
            arriving = tl.dot(b, dstate, input_precision=PRECISION)
            brought += tl.sum(arriving * values.to(tl.float32), axis=1)
            dvalues = arriving * reaching[:, None]
            dvalues = tl.dot(mixing, slope, acc=dvalues, input_precision=PRECISION) * steps[:, None]
            if WIDE_D:
                skip = tl.load(D + head * D_head + p * D_channel, mask=some, other=0.0)
                dvalues += skip[None, :] * slope.to(tl.float32)
            elif HAS_D:
                dvalues += tl.load(D + head * D_head) * slope.to(tl.float32)
            if COPIED:
                to = [row.to(tl.int32), tl.cast(head, tl.int32), chunk * CHUNK, block * HEAD_DIM]
                dx.store(to, dvalues.to(b.dtype).reshape(1, 1, CHUNK, HEAD_DIM))
            else:
                write_tokens(dx + head * dx_head, dvalues, place, p, remaining, head_dims, dx_token, EVEN)
            if WIDE_D:
                skipped = tl.sum(slope.to(tl.float32) * values.to(tl.float32), axis=0)
                tl.store(by_skip + of_chunk * head_dims + p, skipped, mask=some)
        brought *= reaching
        tl.store(sent + tokens, brought)
        tl.store(by_step + tokens, brought + direct)
    pairs = tl.where(seen, pairs, 0.0).to(b.dtype)
    # Read again: shared memory holds more heads without it in between.
    c = read_tokens(C, place, n, remaining, state_dims, C_token, EVEN)
    from_first = row * first_row + group * first_group + start * first_token
    total = tl.dot(pairs, c, input_precision=PRECISION)
    if WHOLE:
        total += read_tokens(first_B + from_first, place, n, remaining, state_dims, first_token, EVEN)
    to = dB + part * dB_part + row * dB_row + group * dB_group + start * dB_token
    write_tokens(to, total, place, n, remaining, state_dims, dB_token, EVEN)
    total = tl.dot(tl.trans(pairs), b, input_precision=PRECISION)
    if WHOLE:
        total += read_tokens(first_C + from_first, place, n, remaining, state_dims, first_token, EVEN)
    to = dC + part * dC_part + row * dC_row + group * dC_group + start * dC_token
    write_tokens(to, total, place, n, remaining, state_dims, dC_token, EVEN)
