"""The operations of state-space blocks, channel-last, one signature each; the fastest backend that works is chosen
behind it.

Works on tensors alone: knows nothing of recipes, families or models. Accumulates in float32, accepts any strides.
`reference.py` is the readable truth; `backend_table.py` lists what can compute an operation, `backends.py` chooses on a
device, and says why.
"""

from ssm_tune.kernels.backends import KernelChoice, KernelError, kernel_report, set_kernel_order
from ssm_tune.kernels.conv import causal_conv1d, causal_conv1d_step
from ssm_tune.kernels.low_rank import low_rank_gradients, low_rank_product, narrow_weight_gradient
from ssm_tune.kernels.mamba3 import mamba3_scan, mamba3_step
from ssm_tune.kernels.norm import add_rms_norm, gated_rms_norm, residual_rms_norm, rms_norm, rms_norm_parts
from ssm_tune.kernels.selective_scan import selective_scan, selective_scan_step
from ssm_tune.kernels.ssd import ssd_scan, ssd_step
from ssm_tune.kernels.ssd_block import ssd_block

__all__ = [
    "KernelChoice",
    "KernelError",
    "add_rms_norm",
    "causal_conv1d",
    "causal_conv1d_step",
    "gated_rms_norm",
    "kernel_report",
    "low_rank_gradients",
    "low_rank_product",
    "mamba3_scan",
    "mamba3_step",
    "narrow_weight_gradient",
    "residual_rms_norm",
    "rms_norm",
    "rms_norm_parts",
    "selective_scan",
    "selective_scan_step",
    "set_kernel_order",
    "ssd_block",
    "ssd_scan",
    "ssd_step",
]
