"""LFM2's mixer: a gated short convolution (no recurrent state)."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.integrations.accelerate import force_accelerate_hooks

from ssm_tune.mixers.classes import Patched
from ssm_tune.mixers.convolution import convolve_row, convolve_token
from ssm_tune.mixers.documents import document_index
from ssm_tune.mixers.projections import project
from ssm_tune.mixers.states import read_states, write_states


class ShortConvMixer(Patched):
    """Goes before a stock mixer in the bases of a patched class; uses the stock attributes and adds none."""

    @force_accelerate_hooks("conv")  # its parameters are read here
    def forward(
        self,
        hidden_states: Tensor,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        seq_idx: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """hidden_states, and the result: (batch, length, hidden). seq_idx: (batch, length) int32, -1 is padding.

        `attention_mask` (batch, length) counts where no seq_idx is given. Other keywords are for stock kernels.
        """
        if seq_idx is None and attention_mask is not None:
            seq_idx = document_index(hidden_states.shape[:2], hidden_states.device, attention_mask=attention_mask)
        before, after, x = project(self.in_proj, hidden_states, self.conv.weight.dtype).chunk(3, dim=-1)
        x = before * x
        window, _ = read_states(cache, self.layer_idx)
        if window is not None and x.shape[1] == 1 and seq_idx is None:
            y = convolve_token(self.conv, x[:, 0], window, activation=None)[:, None]
        else:
            y, window = convolve_row(self.conv, x, window, seq_idx, keep_window=cache is not None, activation=None)
            if cache is not None:
                write_states(cache, self.layer_idx, window)
        return project(self.out_proj, after * y, self.conv.weight.dtype)
