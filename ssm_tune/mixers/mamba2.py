"""The Mamba-2 mixer (Mamba-2, section 7.1 and figure 6), for transformers' models that hold one.

Against stock: out_proj is called as a module, documents are kept apart on every device, training computes what
evaluation computes, and a decoding step clamps step sizes as the scan does.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.integrations.accelerate import force_accelerate_hooks

from ssm_tune import kernels
from ssm_tune.kernels.recompute import recomputed
from ssm_tune.kernels.ssd_block_parts import gated
from ssm_tune.mixers.cast_together import casts_together
from ssm_tune.mixers.classes import Patched
from ssm_tune.mixers.convolution import convolve_row, convolve_token
from ssm_tune.mixers.decay_rates import decay_rates
from ssm_tune.mixers.documents import document_index
from ssm_tune.mixers.later_gradients import later_gradient, project_later, tapped
from ssm_tune.mixers.projected_again import Shares, projected_again
from ssm_tune.mixers.projections import project
from ssm_tune.mixers.raw_parameters import kernel_of, weight_of
from ssm_tune.mixers.states import continued, read_states, write_states

# Layers of which in_proj's output is computed again in backward: as many as it takes to 0.6 of stock's activations.
AGAIN = Shares(frozen=0.055)


class Mamba2Mixer(Patched):
    """Goes before a stock mixer in the bases of a patched class; uses the stock attributes and adds none."""

    @force_accelerate_hooks(["conv1d", "norm"])  # their parameters are read here
    @casts_together("in_proj", "out_proj")
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
        projected = projected_again(self, hidden_states, self._project, AGAIN)
        with recomputed(projected):
            if cache is not None:
                return project(self.out_proj, self._continue(projected, cache, seq_idx), self.conv1d.weight.dtype)
            later = later_gradient(self.out_proj, projected)
            y = self._block(tapped(projected, later), seq_idx)
            return project_later(self.out_proj, y, later, self.conv1d.weight.dtype)

    def _block(self, projected: Tensor, seq_idx: Tensor | None) -> Tensor:
        """A whole row, from in_proj to out_proj, in one operation."""
        A, D, dt_bias = self._recurrence()
        return kernels.ssd_block(
            projected,
            kernel_of(self.conv1d),
            self.conv1d.bias,
            A,
            D,
            dt_bias,
            head_dim=self.head_dim,
            groups=self.n_groups,
            chunk_size=self.chunk_size,
            dt_limit=self._dt_limit(),
            seq_idx=seq_idx,
            **self._norm(),
        )

    def _continue(self, projected: Tensor, cache: Any, seq_idx: Tensor | None) -> Tensor:
        """A row or a token, from the states in the cache, which are brought up to date."""
        z, xBC, dt = projected.split([self.intermediate_size, self.conv_dim, self.num_heads], dim=-1)
        window, state = read_states(cache, self.layer_idx)
        A, D, dt_bias = self._recurrence()
        if state is not None and xBC.shape[1] == 1 and seq_idx is None:
            x, B, C = self._split(convolve_token(self.conv1d, xBC[:, 0], window))
            y = kernels.ssd_step(x, dt[:, 0], A, B, C, state, D, dt_bias, dt_limit=self._dt_limit())[:, None]
        else:
            xBC, window = convolve_row(self.conv1d, xBC, window, seq_idx, keep_window=True)
            x, B, C = self._split(xBC)
            arguments = {"chunk_size": self.chunk_size, "dt_limit": self._dt_limit(), "seq_idx": seq_idx}
            arguments |= {"initial_state": continued(state), "return_final_state": True}
            y, state = kernels.ssd_scan(x, dt, A, B, C, D, dt_bias, **arguments)
            write_states(cache, self.layer_idx, window, state)
        return gated(y.flatten(-2), z, **self._norm())

    def _split(self, xBC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x (..., heads, head_dim), B and C (..., groups, state)."""
        grouped = self.n_groups * self.ssm_state_size
        x, B, C = xBC.split([self.intermediate_size, grouped, grouped], dim=-1)
        groups = (self.n_groups, self.ssm_state_size)
        return x.unflatten(-1, (self.num_heads, self.head_dim)), B.unflatten(-1, groups), C.unflatten(-1, groups)

    def _recurrence(self) -> tuple[Tensor, Tensor, Tensor]:
        """A, D and dt_bias (heads,), in float32."""
        return decay_rates(self.A_log), self.D.float(), self.dt_bias.float()

    def _dt_limit(self) -> tuple[float, float]:
        return tuple(self.time_step_limit)

    def _project(self, hidden_states: Tensor) -> Tensor:
        """z, x, B, C and dt in one tensor (batch, length, projections)."""
        return project(self.in_proj, hidden_states, self.conv1d.weight.dtype)

    def _norm(self) -> dict[str, Any]:
        """The gated norm, in the words of the kernels; no weight: no norm."""
        norm = self.norm
        return {"norm_weight": weight_of(norm), "eps": norm.variance_epsilon, "group_size": norm.group_size}


class FalconH1Mixer(Mamba2Mixer):
    """Multipliers before and after in_proj; a norm that may be absent, or come before the gate.

    Stock's fused training call always puts the gate before the norm, which is another function where the config says
    after.
    """

    def _project(self, hidden_states: Tensor) -> Tensor:
        projected = super()._project(hidden_states * self.ssm_in_multiplier)
        return projected * self.mup_vector.to(projected.dtype)

    def _norm(self) -> dict[str, Any]:
        if not self.mamba_rms_norm:
            return {"norm_weight": None}
        return {
            "norm_weight": weight_of(self.norm),
            "eps": self.norm.variance_epsilon,
            "group_size": self.intermediate_size // self.n_groups,
            "norm_before_gate": self.norm.norm_before_gate,
        }
