"""Our H3 and Samba blocks beside their published torch code, taken from a checkout: forward and gradients.

    git clone https://github.com/HazyResearch/H3 && git clone https://github.com/microsoft/Samba
    pip install einops opt_einsum
    python benchmarks/published_blocks.py --h3 H3 --samba Samba

The published modules are imported as they are, get our block's weights, and both run on the same input in float64 (H3's
shift kernel rounds to float32 inside). Exit code 1 if the largest relative difference is above 1e-5.
Packages that only a GPU has are stood in for by a few lines of plain torch with the same signature, said where used:
for Samba xformers' SwiGLU, the rotary kernel, mamba_ssm's selective scan (the reference of this package) and the fused
RMS norm; attention is PyTorch's, with the window as a mask.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ssm_tune.architectures.configs import H3Config, SambaConfig
from ssm_tune.architectures.h3 import H3Model
from ssm_tune.architectures.samba import SambaModel
from ssm_tune.kernels import set_kernel_order
from ssm_tune.kernels.reference import selective_scan

TOLERANCE = 1e-5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--h3", type=Path, metavar="CHECKOUT")
    parser.add_argument("--samba", type=Path, metavar="CHECKOUT")
    arguments = parser.parse_args()
    set_kernel_order(["reference"])
    worst = 0.0
    print("| block | what | largest relative difference |\n| --- | --- | --- |")
    if arguments.h3:
        for head_dim in (1, 4):
            worst = max(worst, compare_h3(arguments.h3, head_dim))
    if arguments.samba:
        worst = max(worst, compare_samba(arguments.samba))
    return int(worst > TOLERANCE)


def report(name: str, pairs: dict[str, tuple[Tensor, Tensor]]) -> float:
    worst = 0.0
    for what, (ours, theirs) in pairs.items():
        difference = ((ours - theirs).abs().max() / theirs.abs().max()).item()
        worst = max(worst, difference)
        mark = "" if difference <= TOLERANCE else " FAIL"
        print(f"| {name} | {what} | {difference:.1e}{mark} |")
    return worst


def module_named(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(members)
    return module


def run(
    forward: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor, parameters: dict[str, Tensor]
) -> dict[str, Tensor]:
    """The output, and the gradients of input and parameters, for the loss sum(weight * output)."""
    x = x.clone().requires_grad_()
    y = forward(x)
    found = torch.autograd.grad((y * weight).sum(), [x, *parameters.values()])
    return {"output": y, "gradient of the input": found[0], **dict(zip(parameters, found[1:], strict=True))}


# -- H3 --------------------------------------------------------------------------------------------------------------


def compare_h3(checkout: Path, head_dim: int) -> float:
    sys.path.insert(0, str(checkout))
    with mock.patch.dict(sys.modules):
        lightning = module_named("pytorch_lightning")
        lightning.utilities = module_named("pytorch_lightning.utilities", rank_zero_only=lambda call: call)
        sys.modules |= {"pytorch_lightning": lightning, "pytorch_lightning.utilities": lightning.utilities}
        published = importlib.import_module("src.models.ssm.h3")
        torch.manual_seed(0)
        theirs = published.H3(32, d_state=16, head_dim=head_dim, mode="diag", measure="diag-lin")
    sys.path.remove(str(checkout))
    config = H3Config(
        hidden_size=32, num_hidden_layers=2, state_size=16, ssm_head_dim=head_dim, intermediate_size=64, vocab_size=40
    )
    torch.manual_seed(1)
    ours = H3Model(config).layers[0].mixer.double()
    theirs = theirs.double()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    places = {
        **{f"{part}_proj.{kind}": f"{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")},
        "shift.B": "ssm_k_kernel.kernel.B",
        "shift.C": "ssm_k_kernel.kernel.C",
        "shift_D": "ssm_k_D",
        "diagonal.log_dt": "kernel.kernel.log_dt",
        "diagonal.inv_A_real": "kernel.kernel.inv_A_real",
        "diagonal.A_imag": "kernel.kernel.A_imag",
        "diagonal.B": "kernel.kernel.B",
        "diagonal.C": "kernel.kernel.C",
        "D": "D",
        "out_proj.weight": "output_linear.weight",
        "out_proj.bias": "output_linear.bias",
    }
    own = dict(ours.named_parameters())
    assert set(places) == set(own), set(places) ^ set(own)
    published_parameters = dict(theirs.named_parameters()) | dict(theirs.named_buffers())
    with torch.no_grad():
        for name, place in places.items():
            target = published_parameters[place]
            target.copy_(own[name].reshape(target.shape))
            target.requires_grad_()
    x, weight = torch.randn(2, 40, 32).double(), torch.randn(2, 40, 32).double()
    mine = run(ours, x, weight, own)
    other = run(theirs, x, weight, {name: published_parameters[place] for name, place in places.items()})
    name = f"H3, head_dim {head_dim}"
    return report(name, {what: (mine[what], other[what].reshape(mine[what].shape)) for what in mine})


# -- Samba -----------------------------------------------------------------------------------------------------------


class SwiGLU(nn.Module):
    """xformers.ops.SwiGLU with its parameters' names: w3(silu(w1 x) * w2 x)."""

    def __init__(self, size: int, inner: int, *, bias: bool, _pack_weights: bool) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (
            nn.Linear(size, inner, bias),
            nn.Linear(size, inner, bias),
            nn.Linear(inner, size, bias),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.w3(F.silu(self.w1(x)) * self.w2(x))


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inplace: bool) -> Tensor:
    """What apply_rotary_emb_func computes for halves: x (batch, length, heads, channels)."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = (part[: x.shape[1], None] for part in (cos, sin))
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


def scan(u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, **options: Any) -> Tensor:
    """mamba_ssm's selective_scan_fn (channels first) by this package's reference."""
    channels_last = [part.transpose(1, 2) for part in (u, delta, B, C, options["z"])]
    u, delta, B, C, z = channels_last
    y = selective_scan(u, delta, A, B, C, D, z, options["delta_bias"], dt_softplus=options["delta_softplus"])
    return y.transpose(1, 2)


def load_samba(checkout: Path) -> tuple[types.ModuleType, types.ModuleType]:
    """lit_gpt.model and lit_gpt.mamba_simple, without the package's own __init__ and what only GPUs have."""
    package = module_named("lit_gpt", __path__=[str(checkout / "lit_gpt")])
    sys.modules["lit_gpt"] = package
    sys.modules["lit_gpt.fused_rotary_embedding"] = module_named("fused", apply_rotary_emb_func=turn)
    sys.modules["xformers"] = module_named("xformers")
    sys.modules["xformers.ops"] = module_named("ops", SwiGLU=SwiGLU)
    interface = module_named("interface", selective_scan_fn=scan, mamba_inner_fn=None)
    sys.modules["mamba_ssm.ops.selective_scan_interface"] = interface
    sys.modules["causal_conv1d"] = module_named("causal_conv1d", causal_conv1d_fn=None, causal_conv1d_update=None)
    for name, members in (
        ("lightning_utilities.core.imports", {"RequirementCache": lambda requirement: False}),
        ("lit_gpt.gla", {"GatedLinearAttention": None}),
        ("lit_gpt.multiscale_retention", {"MultiScaleRetention": None}),
        ("lit_gpt.mega", {"S6GatedAttention": None}),
        ("lit_gpt.config", {"Config": Any}),
    ):
        sys.modules[name] = module_named(name, **members)
    return importlib.import_module("lit_gpt.model"), importlib.import_module("lit_gpt.mamba_simple")


def compare_samba(checkout: Path) -> float:
    size, inner, heads, window, length = 32, 48, 4, 12, 40
    with mock.patch.dict(sys.modules):
        published, mamba = load_samba(checkout)

        def make_mamba(*args: Any, device: Any = None, dtype: Any = None, **kwargs: Any) -> nn.Module:
            return mamba.Mamba(*args, use_fast_path=False, **kwargs)

        published.Mamba = make_mamba
        values: dict[str, Any] = {"n_embd": size, "n_head": heads, "n_query_groups": heads, "head_size": size // heads}
        values |= {"intermediate_size": inner, "local_window": window, "norm_class": nn.RMSNorm, "norm_eps": 1e-5}
        values |= {"mlp": True, "mlp_class": published.LLaMAMLP, "mb_per_layer": 2, "attn_layer_pos": None}
        values |= {"ret_per_layer": -1, "gla_per_layer": -1, "full_per_layer": 1000000}
        values |= dict.fromkeys(("abl_mamba", "mamba_swa_mlp", "use_mega", "sc_attn", "nope", "bias"), False)
        values |= dict.fromkeys(("shared_attention_norm", "parallel_residual"), False)
        settings = types.SimpleNamespace(**values)
        blocks = nn.ModuleList(published.Block(settings, index) for index in range(2)).double()
        # In float64, not in the bfloat16 that the published model keeps its rotary positions in.
        rope = published.build_rope_cache(length, size // heads, torch.float64, torch.device("cpu"))
    config = SambaConfig(
        hidden_size=size, num_hidden_layers=4, num_attention_heads=heads, intermediate_size=inner, vocab_size=40
    )
    config.sliding_window = window
    config._attn_implementation = "eager"
    torch.manual_seed(1)
    ours = SambaModel(config).double()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    names = copy_samba(ours, blocks, heads)
    steps = torch.arange(length)
    mask = (steps[:, None] >= steps) & (steps[:, None] - steps < window)

    def theirs(x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x, rope, length, mask[None, None])[0]
        return F.rms_norm(x, (size,), ours.norm_f.weight, 1e-5)

    x, weight = torch.randn(2, length, size).double(), torch.randn(2, length, size).double()
    own, other = dict(ours.named_parameters()), dict(blocks.named_parameters())
    shared = {name: place for name, place in names.items() if isinstance(place, str)}
    mine = run(lambda x: ours(inputs_embeds=x, use_cache=False)[0], x, weight, {name: own[name] for name in shared})
    their = run(theirs, x, weight, {name: other[place] for name, place in shared.items()})
    return report("Samba", {what: (mine[what], their[what]) for what in mine})


def copy_samba(ours: nn.Module, blocks: nn.ModuleList, heads: int) -> dict[str, str]:
    """Give the published blocks our weights. Returns our parameters' places among theirs, where one is the other."""
    places: dict[str, str] = {}
    for index, kind in ((0, "mamba"), (2, "attention")):
        block = index // 2
        places[f"layers.{index}.norm.weight"] = f"{block}.norm_1.weight"
        places[f"layers.{index + 1}.norm.weight"] = f"{block}.norm_2.weight"
        for name, place in (("gate_proj", "w1"), ("up_proj", "w2"), ("down_proj", "w3")):
            places[f"layers.{index + 1}.mixer.{name}.weight"] = f"{block}.mlp.swiglu.{place}.weight"
        if kind == "mamba":
            inside = [name for name, _ in ours.layers[index].mixer.named_parameters()]
            places |= {f"layers.{index}.mixer.{name}": f"{block}.attn.{name}" for name in inside}
    places["layers.2.mixer.o_proj.weight"] = "1.attn.proj.weight"
    own, other = dict(ours.named_parameters()), dict(blocks.named_parameters())
    with torch.no_grad():
        for name, place in places.items():
            other[place].copy_(own[name])
        parts = [own[f"layers.2.mixer.{part}_proj.weight"].unflatten(0, (heads, -1)) for part in "qkv"]
        other["1.attn.attn.weight"].copy_(torch.stack(parts, 1).flatten(0, 2))  # of each head q, k and v
    return places


if __name__ == "__main__":
    sys.exit(main())
