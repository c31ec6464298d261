"""The families: one row per model_type, and what is not right with it, by name.

A row is names and facts, no code and no import of torch: other modules ask it which layers there are to adapt, to
wrap, to keep in float32. The mixers (`ssm_tune.mixers`) ask it which class computes what. To add a family whose mixer
is a Mamba-1 or Mamba-2 block, add a row; for a new kind of mixer, add a file in `ssm_tune/mixers` as well.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from ssm_tune.recipe import RecipeError

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_GATED_MLP = ("gate_proj", "up_proj", "down_proj")
_SCAN, _SSD = ("causal_conv1d", "selective_scan"), ("ssd_block", "causal_conv1d", "ssd_scan", "gated_rms_norm")
# By kind of mixer, or by model_type where the whole model is ours.
_OPERATIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("mamba", "normed_mamba", "mamba_heads", "mamba_hybrid", "samba"), _SCAN),
    **dict.fromkeys(("mamba2", "falcon_h1", "mamba2_hybrid"), _SSD),
    "mamba3": ("mamba3_scan",),
    "short_conv": ("causal_conv1d",),
    **dict.fromkeys(("h3", "llama"), ()),
}
_SSD_PARAMETERS = ("A_log", "D", "dt_bias")


@dataclass(frozen=True)
class Family:
    """What one model_type is made of. Names of modules are leaf names, unless said otherwise.

    Attributes:
        model_type: the config's own.
        block: class of the layers that hold a state-space mixer; the unit of checkpointing and sharding.
        other_blocks: classes of the further layers of a hybrid, same use.
        mixer: class of the mixer. mixer_path: its attribute in the block.
        kind: which mixer of `ssm_tune.mixers.patch` computes it; None: left to transformers.
        projections: the mixer's linear layers. attention, mlp: those of the other layers of a hybrid.
        portable: the linear layers whose adapters unpatched PEFT loads with equal logits.
        ssm_parameters: parameters of the state-space recurrence, as the ends of their names. Kept in float32, not
            decayed.
        weights_outside_linear: projections that are bare parameters, which no adapter on modules reaches.
        shared: attributes of blocks whose weights are those of other blocks too.
        exact: a packed row gives what each of its documents gives alone, in training and evaluation.
        refused: what cannot be right: "packing", or the leaf name of a target, and why. See `refusals`.
    """

    model_type: str
    block: str
    mixer: str
    mixer_path: str
    projections: tuple[str, ...]
    portable: tuple[str, ...]
    kind: str | None = None
    other_blocks: tuple[str, ...] = ()
    attention: tuple[str, ...] = ()
    mlp: tuple[str, ...] = ()
    ssm_parameters: tuple[str, ...] = _SSD_PARAMETERS
    weights_outside_linear: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    exact: bool = False
    refused: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def hybrid(self) -> bool:
        """Whether there are attention layers between (or beside) the state-space mixers."""
        return bool(self.attention)

    @property
    def operations(self) -> tuple[str, ...]:
        """The operations of `ssm_tune.kernels` that a whole row takes: what is tried and reported before training."""
        return _OPERATIONS[self.kind or self.model_type]

    @property
    def blocks(self) -> tuple[str, ...]:
        """Every class to wrap when layers are sharded or checkpointed."""
        return (self.block, *self.other_blocks)

    def is_ssm_parameter(self, name: str) -> bool:
        """Whether a parameter of this name, with or without a path before it, belongs to the recurrence itself."""
        return any(name == end or name.endswith("." + end) for end in self.ssm_parameters)


# Attention that takes the mask which keeps packed documents apart. Others are not known to, and are refused for
# packing.
MASKED_ATTENTION = ("sdpa", "eager")

_ROWS = (
    Family(
        model_type="mamba",
        block="MambaBlock",
        mixer="MambaMixer",
        mixer_path="mixer",
        kind="mamba",
        projections=("in_proj", "x_proj", "dt_proj", "out_proj"),
        portable=("in_proj", "x_proj"),
        ssm_parameters=("A_log", "D", "dt_proj.bias"),
        exact=True,
    ),
    Family(
        model_type="falcon_mamba",
        block="FalconMambaBlock",
        mixer="FalconMambaMixer",
        mixer_path="mixer",
        kind="normed_mamba",
        projections=("in_proj", "x_proj", "dt_proj", "out_proj"),
        portable=("in_proj", "x_proj"),
        ssm_parameters=("A_log", "D", "dt_proj.bias"),
        exact=True,
    ),
    Family(
        model_type="mamba2",
        block="Mamba2Block",
        mixer="Mamba2Mixer",
        mixer_path="mixer",
        kind="mamba2",
        projections=("in_proj", "out_proj"),
        portable=("in_proj",),
        exact=True,
    ),
    Family(
        model_type="jamba",
        block="JambaMambaDecoderLayer",
        other_blocks=("JambaAttentionDecoderLayer",),
        mixer="JambaMambaMixer",
        mixer_path="mamba",
        kind="normed_mamba",
        projections=("in_proj", "x_proj", "dt_proj", "out_proj"),
        attention=_ATTENTION,
        mlp=_GATED_MLP,
        portable=("in_proj", "x_proj", "out_proj", *_ATTENTION, *_GATED_MLP),
        ssm_parameters=("A_log", "D", "dt_proj.bias"),
        exact=True,
    ),
    Family(
        model_type="zamba",
        block="ZambaMambaDecoderLayer",
        other_blocks=("ZambaHybridLayer",),
        mixer="ZambaMambaMixer",
        mixer_path="mamba",
        kind="mamba_heads",
        projections=("in_proj", "out_proj"),
        attention=_ATTENTION,
        mlp=(*_GATED_MLP, "linear"),
        portable=("in_proj", "out_proj"),
        ssm_parameters=("A_log", "D", "dt_proj_bias"),
        weights_outside_linear=("x_proj_weight", "dt_proj_weight"),
        shared=("shared_transf",),
        exact=True,
    ),
    Family(
        model_type="zamba2",
        block="Zamba2MambaDecoderLayer",
        other_blocks=("Zamba2HybridLayer",),
        mixer="Zamba2MambaMixer",
        mixer_path="mamba",
        kind="mamba2",
        projections=("in_proj", "out_proj"),
        attention=_ATTENTION,
        mlp=("gate_up_proj", "down_proj", "linear"),
        portable=("in_proj", "out_proj"),
        shared=("shared_transformer",),
        exact=True,
    ),
    Family(
        model_type="bamba",
        block="BambaDecoderLayer",
        mixer="BambaMixer",
        mixer_path="mamba",
        kind="mamba2",
        projections=("in_proj", "out_proj"),
        attention=_ATTENTION,
        mlp=_GATED_MLP,
        portable=("in_proj", "out_proj", *_ATTENTION, *_GATED_MLP),
        exact=True,
    ),
    Family(
        model_type="falcon_h1",
        block="FalconH1DecoderLayer",
        mixer="FalconH1Mixer",
        mixer_path="mamba",
        kind="falcon_h1",
        projections=("in_proj", "out_proj"),
        attention=_ATTENTION,
        mlp=_GATED_MLP,
        portable=("in_proj", *_ATTENTION, *_GATED_MLP),
        exact=True,
    ),
    Family(
        model_type="nemotron_h",
        block="NemotronHBlock",
        mixer="NemotronHMamba2Mixer",
        mixer_path="mixer",
        kind="mamba2",
        projections=("in_proj", "out_proj"),
        attention=_ATTENTION,
        mlp=("up_proj", "down_proj"),
        portable=("in_proj", *_ATTENTION, "up_proj", "down_proj"),
        exact=True,
    ),
    Family(
        model_type="granitemoehybrid",
        block="GraniteMoeHybridDecoderLayer",
        mixer="GraniteMoeHybridMambaLayer",
        mixer_path="mamba",
        kind="mamba2",
        projections=("in_proj", "out_proj"),
        attention=_ATTENTION,
        mlp=("input_linear", "output_linear"),
        portable=("in_proj", "out_proj", *_ATTENTION, "input_linear", "output_linear"),
        exact=True,
    ),
    Family(
        model_type="lfm2",
        block="Lfm2DecoderLayer",
        mixer="Lfm2ShortConv",
        mixer_path="conv",
        kind="short_conv",
        projections=("in_proj", "out_proj"),
        attention=("q_proj", "k_proj", "v_proj", "out_proj"),
        mlp=("w1", "w2", "w3"),
        portable=("in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "w1", "w2", "w3"),
        ssm_parameters=(),
        exact=True,
    ),
)

FAMILIES: dict[str, Family] = {row.model_type: row for row in _ROWS}

_MAMBA3_PARAMETERS = ("dt_bias", "B_bias", "C_bias", "D", "mimo_x", "mimo_z", "mimo_o")
_MAMBA_HYBRID = Family(
    model_type="mamba_hybrid",
    block="DecoderBlock",
    mixer="MambaMixer",
    mixer_path="mixer",
    projections=("in_proj", "x_proj", "dt_proj", "out_proj"),
    attention=_ATTENTION,
    mlp=_GATED_MLP,
    portable=("in_proj", "x_proj", "dt_proj", "out_proj", *_ATTENTION, *_GATED_MLP),
    ssm_parameters=("A_log", "D", "dt_proj.bias"),
    exact=True,
)
_OWN_ROWS = (
    Family(
        model_type="mamba3",
        block="DecoderBlock",
        mixer="Mamba3Mixer",
        mixer_path="mixer",
        projections=("in_proj", "out_proj"),
        attention=_ATTENTION,
        mlp=_GATED_MLP,
        portable=("in_proj", "out_proj", *_ATTENTION, *_GATED_MLP),
        ssm_parameters=_MAMBA3_PARAMETERS,
        exact=True,
    ),
    _MAMBA_HYBRID,
    replace(_MAMBA_HYBRID, model_type="samba"),
    Family(
        model_type="mamba2_hybrid",
        block="DecoderBlock",
        mixer="Mamba2Mixer",
        mixer_path="mixer",
        projections=("in_proj", "out_proj"),
        attention=("in_proj", "out_proj"),
        mlp=_GATED_MLP,
        portable=("in_proj", "out_proj", *_GATED_MLP),
        exact=True,
    ),
    Family(
        model_type="h3",
        block="DecoderBlock",
        mixer="H3Mixer",
        mixer_path="mixer",
        projections=("q_proj", "k_proj", "v_proj", "out_proj"),
        attention=_ATTENTION,
        mlp=("up_proj", "down_proj"),
        portable=("out_proj", *_ATTENTION, "up_proj", "down_proj"),
        ssm_parameters=(
            *("shift.B", "shift.C", "shift_D", "D"),
            *(f"diagonal.{name}" for name in ("log_dt", "inv_A_real", "A_imag", "B", "C")),
        ),
        exact=True,
    ),
    Family(
        model_type="llama",
        block="LlamaDecoderLayer",
        mixer="",
        mixer_path="",
        projections=(),
        attention=_ATTENTION,
        mlp=_GATED_MLP,
        portable=(*_ATTENTION, *_GATED_MLP),
        ssm_parameters=(),
        exact=True,
    ),
)
# Models that need no forwards of ours put in: those of `ssm_tune.architectures`, and the Transformer to compare with.
OWN_FAMILIES: dict[str, Family] = {row.model_type: row for row in _OWN_ROWS}


def family_of(model_type: str) -> Family:
    """The row of a model_type; RecipeError with the nearest names if there is none."""
    known = FAMILIES | OWN_FAMILIES
    if model_type in known:
        return known[model_type]
    near = difflib.get_close_matches(model_type, known, n=3)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    raise RecipeError(
        f"model.name: a model of type {model_type!r} is not one that ssm-tune can train.{hint} "
        f"It trains {', '.join(known)}."
    )


def refusals(
    family: Family, *, packing: bool = False, targets: Collection[str] = (), attention: str | None = None
) -> list[str]:
    """What of a run would silently go wrong in this family: one message each, with the way out; none when all is right.

    Args:
        packing: rows hold several documents that must not see each other.
        targets: leaf names of the modules that get adapters.
        attention: the attention implementation that the model was (or will be) loaded with; None: transformers'
            default.
    """
    messages = []
    if packing and not family.exact:
        reason = family.refused.get("packing", "its documents are not kept apart.")
        messages.append(f"training.packing: {family.model_type}: {reason} Set training.packing=false.")
    if packing and family.hybrid and attention not in (None, *MASKED_ATTENTION):
        messages.append(
            f"model.attn_implementation: {attention} is not known to keep the documents of packed rows apart in "
            f"{family.model_type}. Use {' or '.join(MASKED_ATTENTION)}, or set training.packing=false."
        )
    for target in targets:
        if target in family.refused:
            messages.append(f"adapter.targets: {family.model_type}: {target}: {family.refused[target]}")
    return messages
