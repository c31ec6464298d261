"""Zamba's mixer: Mamba-1 in several heads, each with its own x and dt projections, which are bare parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.integrations.accelerate import force_accelerate_hooks

from ssm_tune import kernels
from ssm_tune.kernels.recompute import recomputed
from ssm_tune.mixers.classes import Patched
from ssm_tune.mixers.convolution import convolve_row, convolve_token
from ssm_tune.mixers.decay_rates import decay_rates
from ssm_tune.mixers.documents import document_index
from ssm_tune.mixers.projections import project
from ssm_tune.mixers.states import continued, read_states, write_states


class MambaHeadsMixer(Patched):
    """Goes before a stock mixer in the bases of a patched class; uses the stock attributes and adds none."""

    @force_accelerate_hooks("conv1d")  # its parameters are read here
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
        window, state = read_states(cache, self.layer_idx)
        # The two halves of in_proj are interleaved, channel by channel.
        x, z = project(self.in_proj, hidden_states, self.conv1d.weight.dtype).unflatten(-1, (-1, 2)).unbind(-1)
        with recomputed(x):
            y = self._scan(x, z, cache, window, state, seq_idx)
        return project(self.out_proj, y, self.conv1d.weight.dtype)

    def _scan(
        self, x: Tensor, z: Tensor, cache: Any, window: Tensor | None, state: Tensor | None, seq_idx: Tensor | None
    ) -> Tensor:
        stepping = state is not None and x.shape[1] == 1 and seq_idx is None
        if stepping:
            x = convolve_token(self.conv1d, x[:, 0], window)[:, None]
        else:
            x, window = convolve_row(self.conv1d, x, window, seq_idx, keep_window=cache is not None)
        x, z = (values.unflatten(-1, (self.n_mamba_heads, self.mamba_head_dim)) for values in (x, z))
        dt, B, C = self._select(x)
        A, D, dt_bias = decay_rates(self.A_log), self.D.float(), self.dt_proj_bias.float()
        outputs, states = [], []
        for head in range(self.n_mamba_heads):
            of_row = (x[:, :, head], dt[:, :, head], A[head], B[:, :, head], C[:, :, head], D[head], z[:, :, head])
            if stepping:
                one = [values[:, 0] if values.dim() == 3 else values for values in of_row]
                outputs.append(kernels.selective_scan_step(*one[:5], state[:, head], *one[5:], dt_bias[head])[:, None])
                continue
            before = None if state is None else continued(state[:, head])
            arguments = {"dt_bias": dt_bias[head], "seq_idx": seq_idx, "initial_state": before}
            if cache is None:
                outputs.append(kernels.selective_scan(*of_row, **arguments))
            else:
                y, after = kernels.selective_scan(*of_row, **arguments, return_final_state=True)
                outputs.append(y)
                states.append(after)
        if states:
            write_states(cache, self.layer_idx, window, torch.stack(states, dim=1))
        return torch.cat(outputs, dim=-1)

    def _select(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dt (batch, length, heads, head_dim) without its bias, B and C (batch, length, heads, state)."""
        selected = torch.einsum("blhd,hkd->blhk", x, self.x_proj_weight.to(x.dtype))
        dt, B, C = selected.split([self.time_step_rank, self.ssm_state_size, self.ssm_state_size], dim=-1)
        return torch.einsum("blhr,hdr->blhd", dt, self.dt_proj_weight.to(dt.dtype)), B, C
