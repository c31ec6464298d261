"""The table of kernels: for each operation the backends that can compute it, in the order of preference."""

from __future__ import annotations

from dataclasses import dataclass

from ssm_tune.kernels.packages import HUB_CAUSAL_CONV1D, HUB_MAMBA_SSM, Package


@dataclass(frozen=True)
class Backend:
    """One way to run one operation: the function of that name in `module`, tried on devices of these kinds only.

    `devices` None: any device, and no trial, since it is plain PyTorch. `package`: what a user installs for it.
    `errors`: what the package raises beside the built-in exceptions, as "module:class". `cost`: against the first of
    the list. `prebuilt`: the Hub's package that is handed to the function in the place of the installed one. `also`:
    further names by which a user's order means it.
    """

    operation: str
    name: str
    module: str
    devices: tuple[str, ...] | None = None
    package: str = ""
    errors: tuple[str, ...] = ()
    cost: str = ""
    prebuilt: Package | None = None
    also: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """Where the kernel comes from, in the words of SOURCES."""
        if self.prebuilt is not None:
            return "hub"
        if self.devices is None:
            return "pytorch"
        return "installed" if self.package in ("mamba_ssm", "causal_conv1d") else "ours"


_CPU = ("cpu",)
_CUDA = ("cuda",)
_NUMBA = ("numba.core.errors:NumbaError",)
_TRITON = ("triton.errors:TritonError",)
_TOKEN_BY_TOKEN = "one token at a time in PyTorch, 100 times slower or more"
_SEVERAL_KERNELS = "several small kernels of PyTorch, about 3 times slower"

# What a user may put in order, besides the names of backends: mamba-ssm and causal-conv1d as installed; the same,
# prebuilt, from the Hub; our own loops; plain PyTorch.
SOURCES = ("installed", "hub", "ours", "pytorch")


def _hub(operation: str, module: str, package: Package, errors: tuple[str, ...] = ()) -> Backend:
    return Backend(operation, "hub", module, _CUDA, "kernels", errors, prebuilt=package)


# The order within an operation is the order of preference.
BACKENDS = (
    Backend("selective_scan", "numba", "cpu_scan", _CPU, "numba", _NUMBA),
    Backend("selective_scan", "cuda", "cuda_scan", _CUDA, "torch"),
    Backend("selective_scan", "triton", "triton_scan", _CUDA, "triton", _TRITON),
    Backend("selective_scan", "mamba_ssm", "mamba_ssm_scan", _CUDA, "mamba_ssm", _TRITON),
    _hub("selective_scan", "mamba_ssm_scan", HUB_MAMBA_SSM, _TRITON),
    Backend("selective_scan", "reference", "reference", cost=_TOKEN_BY_TOKEN),
    Backend("selective_scan_step", "mamba_ssm", "mamba_ssm_scan", _CUDA, "mamba_ssm", _TRITON),
    _hub("selective_scan_step", "mamba_ssm_scan", HUB_MAMBA_SSM, _TRITON),
    Backend("selective_scan_step", "reference", "reference", cost=_SEVERAL_KERNELS),
    Backend("ssd_scan", "numba", "cpu_ssd", _CPU, "numba", _NUMBA),
    Backend("ssd_scan", "triton", "triton_ssd", _CUDA, "triton", _TRITON),
    Backend("ssd_scan", "mamba_ssm", "mamba_ssm_ssd", _CUDA, "mamba_ssm", _TRITON),
    _hub("ssd_scan", "mamba_ssm_ssd", HUB_MAMBA_SSM, _TRITON),
    Backend("ssd_scan", "chunked", "ssd_chunked", cost="chunks of matrix products in PyTorch, several times slower"),
    Backend("ssd_scan", "reference", "reference", cost=_TOKEN_BY_TOKEN),
    Backend("ssd_block", "triton", "triton_ssd_block", _CUDA, "triton", _TRITON),
    Backend("ssd_block", "mamba_ssm", "mamba_ssm_block", _CUDA, "mamba_ssm", _TRITON),
    _hub("ssd_block", "mamba_ssm_block", HUB_MAMBA_SSM, _TRITON),
    # An order that names one of another kind for a part means the parts.
    Backend(
        "ssd_block",
        "parts",
        "ssd_block_parts",
        cost="its parts one by one, a tenth slower and with more memory",
        also=("ours", "numba", "chunked", "gathered"),
    ),
    Backend("ssd_block", "reference", "reference", cost=_TOKEN_BY_TOKEN),
    Backend("ssd_step", "mamba_ssm", "mamba_ssm_ssd", _CUDA, "mamba_ssm", _TRITON),
    _hub("ssd_step", "mamba_ssm_ssd", HUB_MAMBA_SSM, _TRITON),
    Backend("ssd_step", "reference", "reference", cost=_SEVERAL_KERNELS),
    Backend("mamba3_scan", "mamba_ssm", "mamba3_triton", _CUDA, "mamba_ssm", _TRITON),
    Backend(
        "mamba3_scan", "chunked", "mamba3_chunked", cost="chunks of matrix products in PyTorch, several times slower"
    ),
    Backend("mamba3_scan", "reference", "mamba3_reference", cost=_TOKEN_BY_TOKEN),
    Backend("causal_conv1d", "numba", "cpu_conv", _CPU, "numba", _NUMBA),
    Backend("causal_conv1d", "cuda", "cuda_conv", _CUDA, "torch"),
    Backend("causal_conv1d", "causal_conv1d", "causal_conv1d_cuda", _CUDA, "causal_conv1d"),
    Backend("causal_conv1d", "triton", "triton_conv", _CUDA, "triton", _TRITON),
    _hub("causal_conv1d", "causal_conv1d_cuda", HUB_CAUSAL_CONV1D),
    Backend("causal_conv1d", "gathered", "conv_gathered", cost="several passes over the row, about 5 times slower"),
    Backend("causal_conv1d", "reference", "reference", cost=_TOKEN_BY_TOKEN),
    Backend("causal_conv1d_step", "causal_conv1d", "causal_conv1d_cuda", _CUDA, "causal_conv1d"),
    _hub("causal_conv1d_step", "causal_conv1d_cuda", HUB_CAUSAL_CONV1D),
    Backend("causal_conv1d_step", "reference", "reference", cost=_SEVERAL_KERNELS),
    Backend("rms_norm", "mamba_ssm", "mamba_ssm_norm", _CUDA, "mamba_ssm", _TRITON),
    _hub("rms_norm", "mamba_ssm_norm", HUB_MAMBA_SSM, _TRITON),
    Backend("rms_norm", "reference", "reference", cost=_SEVERAL_KERNELS),
    Backend("rms_norm_parts", "triton", "norm_parts_triton", _CUDA, "triton", _TRITON),
    Backend("rms_norm_parts", "reference", "reference", cost=_SEVERAL_KERNELS),
    Backend("add_rms_norm", "triton", "add_norm_triton", _CUDA, "triton", _TRITON),
    Backend("add_rms_norm", "reference", "reference", cost=_SEVERAL_KERNELS),
    Backend("residual_rms_norm", "triton", "residual_norm_triton", _CUDA, "triton", _TRITON),
    Backend("residual_rms_norm", "reference", "reference", cost=_SEVERAL_KERNELS),
    Backend("gated_rms_norm", "triton", "triton_gated_norm", _CUDA, "triton", _TRITON),
    Backend("gated_rms_norm", "mamba_ssm", "mamba_ssm_norm", _CUDA, "mamba_ssm", _TRITON),
    _hub("gated_rms_norm", "mamba_ssm_norm", HUB_MAMBA_SSM, _TRITON),
    Backend("gated_rms_norm", "reference", "reference", cost=_SEVERAL_KERNELS),
    Backend("low_rank_product", "triton", "low_rank_triton", _CUDA, "triton", _TRITON),
    Backend("low_rank_product", "parts", "products", cost="a product for each factor"),
    Backend("narrow_weight_gradient", "triton", "low_rank_triton", _CUDA, "triton", _TRITON),
    Backend("narrow_weight_gradient", "parts", "products", cost=_SEVERAL_KERNELS),
    Backend("low_rank_gradients", "triton", "low_rank_triton", _CUDA, "triton", _TRITON),
    Backend("low_rank_gradients", "parts", "products", cost="a pass over the slope for each result"),
)
OPERATIONS = tuple(dict.fromkeys(backend.operation for backend in BACKENDS))
