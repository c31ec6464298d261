"""The Mamba-1 mixer (Mamba, section 3.4 and figure 3), for transformers' models that hold one.

Against stock: every projection is called as a module, documents are kept apart, training computes what evaluation
computes, and a cache is continued by any number of tokens.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.integrations.accelerate import force_accelerate_hooks

from ssm_tune import kernels
from ssm_tune.kernels.gradient_halves import split_in_two
from ssm_tune.kernels.gradient_sums import used_twice
from ssm_tune.kernels.recompute import random_state_for, recomputable, recomputed, reference_to
from ssm_tune.mixers.cast_together import casts_together, with_these_copies
from ssm_tune.mixers.classes import Patched
from ssm_tune.mixers.convolution import convolve_row, convolve_token
from ssm_tune.mixers.decay_rates import decay_rates
from ssm_tune.mixers.documents import document_index
from ssm_tune.mixers.later_gradients import LaterGradient, later_gradient, project_later, tapped
from ssm_tune.mixers.norms import normalised_parts
from ssm_tune.mixers.projected_again import Shares, projected_again
from ssm_tune.mixers.projections import project, project_without_bias
from ssm_tune.mixers.states import continued, read_states, write_states

# Layers of which in_proj's output is computed again in backward: as many as it takes to 0.6 of stock's activations.
AGAIN = Shares(frozen=0.19, narrow=0.04)


class MambaMixer(Patched):
    """Goes before a stock mixer in the bases of a patched class; uses the stock attributes and adds none."""

    @force_accelerate_hooks(["conv1d", "dt_proj"])  # their parameters are read here, besides being called
    @casts_together("in_proj", "x_proj", "dt_proj", "out_proj")
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
        x, z = split_in_two(projected_again(self, hidden_states, self._project, AGAIN))
        with recomputed(x):
            later = None
            if state is not None and x.shape[1] == 1 and seq_idx is None:
                y = self._step(x[:, 0], z[:, 0], window, state)
            else:
                later = later_gradient(self.out_proj, x)
                y = self._scan_row(x, z, cache, window, state, seq_idx, later)
            return project_later(self.out_proj, y, later, self.conv1d.weight.dtype)

    def _project(self, hidden_states: Tensor) -> Tensor:
        """x and z in one tensor (batch, length, 2 dim)."""
        return project(self.in_proj, hidden_states, self.conv1d.weight.dtype)

    def _step(self, x: Tensor, z: Tensor, window: Tensor, state: Tensor) -> Tensor:
        x = convolve_token(self.conv1d, x, window)
        dt, B, C, dt_bias = self._select(x[:, None])
        A, D = self._recurrence()
        return kernels.selective_scan_step(x, dt[:, 0], A, B[:, 0], C[:, 0], state, D, z, dt_bias)[:, None]

    def _scan_row(
        self,
        x: Tensor,
        z: Tensor,
        cache: Any,
        window: Tensor | None,
        state: Tensor | None,
        seq_idx: Tensor | None,
        later: LaterGradient | None,
    ) -> Tensor:
        x, window = convolve_row(self.conv1d, x, window, seq_idx, keep_window=cache is not None)
        x, scanned = used_twice(x)
        dt, B, C, dt_bias = self._select(x)
        x = tapped(scanned, later)
        A, D = self._recurrence()
        arguments = {"z": z, "dt_bias": dt_bias, "seq_idx": seq_idx, "initial_state": continued(state)}
        if cache is None:
            return kernels.selective_scan(x, dt, A, B, C, D, **arguments)
        y, state = kernels.selective_scan(x, dt, A, B, C, D, **arguments, return_final_state=True)
        write_states(cache, self.layer_idx, window, state)
        return y

    def _select(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """dt (batch, length, dim) without its bias, B and C (batch, length, state), and the bias (dim,) in float32."""
        sizes = [self.time_step_rank, self.ssm_state_size, self.ssm_state_size]
        low_rank, B, C = self._parts(project(self.x_proj, x, self.conv1d.weight.dtype), sizes)
        random_state = random_state_for(self.dt_proj, low_rank)
        dt, dt_bias = project_without_bias(self.dt_proj, low_rank)
        given = reference_to(low_rank)
        again = with_these_copies(lambda: [project_without_bias(self.dt_proj, given())[0]])
        recomputable([dt], again, random_state)
        return dt, B, C, None if dt_bias is None else dt_bias.float()

    def _parts(self, selected: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        return selected.split(sizes, dim=-1)

    def _recurrence(self) -> tuple[Tensor, Tensor]:
        """A (dim, state) and D (dim,), in float32."""
        return decay_rates(self.A_log), self.D.float()


class NormedMambaMixer(MambaMixer):
    """Falcon-Mamba and Jamba normalise dt, B and C. dt before dt_proj, as both models do in evaluation and in every
    server.

    The fused kernel that stock trains Falcon-Mamba with normalises dt after dt_proj, which is another function.
    """

    def _parts(self, selected: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        return normalised_parts((self.dt_layernorm, self.b_layernorm, self.c_layernorm), selected, sizes)
