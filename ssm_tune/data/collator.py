"""Token rows into a batch of tensors, with the borders of the documents in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_NO_LOSS = -100


@dataclass
class Collator:
    """Makes the batches that a patched model takes, padded on the right.

    Rows have input_ids, labels, seq_lengths and rows (see `ssm_tune.data.prepare.PreparedData`). A batch has

    - input_ids, labels: int64 (batch, length). No label stands on the first token of a document: what comes before it
      in a packed row does not predict it. Padding has no label because of where it is, whatever token it is, so that
      eos is learned even by a tokenizer that pads with eos.
    - attention_mask: int64 (batch, length), where no row is packed; or
    - position_ids: int64, starting again at 0 in every document, and seq_idx: int32, the number of the document in its
      row and -1 on padding; both (batch, length).
    - rows: int64 (batch, most documents in a row), the numbers of the source rows, -1 where there are fewer.

    Args:
        pad_token_id: what padding is filled with.
        fixed_length: the length of packed rows; every batch then has exactly this length. None: the longest row's.
    """

    pad_token_id: int
    fixed_length: int | None = None

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        longest = max(len(row["input_ids"]) for row in rows)
        if self.fixed_length is not None and longest > self.fixed_length:
            raise ValueError(f"a row of {longest} tokens does not fit into a batch of length {self.fixed_length}")
        shape = (len(rows), self.fixed_length or longest)
        input_ids = np.full(shape, self.pad_token_id, np.int64)
        labels = np.full(shape, _NO_LOSS, np.int64)
        seq_idx = np.full(shape, -1, np.int32)
        position_ids = np.zeros(shape, np.int64)
        numbers = np.full((len(rows), max(len(row["rows"]) for row in rows)), -1, np.int64)
        for index, row in enumerate(rows):
            length = len(row["input_ids"])
            lengths = np.asarray(row["seq_lengths"])
            if lengths.sum() != length:
                raise ValueError(f"the documents of a row have {lengths.sum()} tokens, the row has {length}")
            starts = np.cumsum(lengths) - lengths
            input_ids[index, :length] = row["input_ids"]
            labels[index, :length] = row["labels"]
            labels[index, starts] = _NO_LOSS
            seq_idx[index, :length] = np.repeat(np.arange(len(lengths)), lengths)
            position_ids[index, :length] = np.arange(length) - np.repeat(starts, lengths)
            numbers[index, : len(row["rows"])] = row["rows"]
        packed = self.fixed_length is not None or any(len(row["seq_lengths"]) > 1 for row in rows)
        batch: dict[str, NDArray[Any]] = {"input_ids": input_ids, "labels": labels, "rows": numbers}
        if packed:
            batch |= {"position_ids": position_ids, "seq_idx": seq_idx}
        else:
            batch["attention_mask"] = (seq_idx >= 0).astype(np.int64)
        return {name: torch.from_numpy(values) for name, values in batch.items()}
