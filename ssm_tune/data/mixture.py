"""Which rows are held out, and how often each source's rows come."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ssm_tune.data.rows import split_documents
from ssm_tune.data.tokens import Documents
from ssm_tune.recipe import RecipeError

_REFUSED_ABOVE = 1000  # passes over a source in one epoch: a slip in the weights rather than a wish


def hold_out(
    documents: Documents, fraction: float, seed: int, piece_length: int | None = None
) -> tuple[Documents, Documents]:
    """A share of the rows for evaluation, drawn with `seed`; the rest, and that share.

    Rows of equal content go to the same side. Where there are too few documents for the share to hold a whole one (one
    long text file), the ends of the documents are held out, in pieces of `piece_length` tokens.
    Raises RecipeError if that is not possible either: fewer than two different rows.
    """
    contents, which = np.unique(documents.keys, return_inverse=True)
    if piece_length is not None and len(contents) * fraction < 1 and documents.lengths.max() > piece_length:
        return _hold_out_ends(split_documents(documents, piece_length), fraction)
    if len(contents) < 2:
        raise RecipeError(
            f"data.eval_fraction: {len(documents):,} rows with {len(contents)} different content cannot be split. "
            "Name held-out rows in data.eval, or leave eval_fraction out."
        )
    wanted = max(round(len(documents) * fraction), 1)
    sizes = np.bincount(which)
    order = np.random.default_rng(seed).permutation(len(contents))
    held = np.zeros(len(contents), np.bool_)
    taken = 0
    for content in order.tolist():
        if taken + sizes[content] <= wanted:
            held[content] = True
            taken += int(sizes[content])
            if taken == wanted:
                break
    if not taken:  # every row comes more often than that
        held[order[np.argmin(sizes[order])]] = True
    chosen = held[which]
    return documents.take(np.flatnonzero(~chosen)), documents.take(np.flatnonzero(chosen))


def _hold_out_ends(pieces: Documents, fraction: float) -> tuple[Documents, Documents]:
    held = np.zeros(len(pieces), np.bool_)
    for row in np.unique(pieces.rows):
        of_row = np.flatnonzero(pieces.rows == row)
        if len(of_row) > 1:
            held[of_row[-max(round(len(of_row) * fraction), 1) :]] = True
    return pieces.take(np.flatnonzero(~held)), pieces.take(np.flatnonzero(held))


def weigh(documents: Documents, weights: Sequence[float | None], seed: int) -> tuple[Documents, list[tuple[int, str]]]:
    """Repeat the rows of each source (`documents.groups` counts them) so that their shares are as the weights.

    A weight is a source's share of the rows, against the others' weights; 1 where one is absent and others are given.
    Without any weight every row comes once. Every row comes at least once in an epoch, so a source whose share is
    larger than its rows is repeated: whole passes, and a part drawn with `seed`.

    Returns the documents and a note for each source that is repeated. Raises RecipeError for absurd repetition.
    """
    if len(weights) < 2 or all(weight is None for weight in weights):
        return documents, []
    shares = np.array([1.0 if weight is None else weight for weight in weights])
    counts = np.bincount(documents.groups, minlength=len(weights))
    wanted = np.maximum(np.round(shares * (counts / shares).max()).astype(np.int64), counts)
    random = np.random.default_rng(seed)
    order, notes = [], []
    for group, (count, want) in enumerate(zip(counts.tolist(), wanted.tolist(), strict=True)):
        own = np.flatnonzero(documents.groups == group)
        if not count:
            continue
        if want > count * _REFUSED_ABOVE:
            raise RecipeError(
                f"data.train.{group}.weight: its {count:,} rows would come {want / count:,.0f} times in an epoch, so "
                "that no row of the other sources is lost. Make the weights less unequal."
            )
        rest = np.sort(random.choice(own, want % count, replace=False))
        order += [own] * (want // count) + [rest]
        if want > count:
            notes.append((group, f"every row comes {want / count:.3g} times in an epoch, for its weight"))
    return documents.take(np.concatenate(order)), notes
