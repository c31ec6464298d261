"""Parameter groups: what decays and what does not.

A_log, D and dt_bias are parameters of a dynamical system, not weights of a linear map: shrinking them towards zero
moves time constants (A = -exp(A_log) towards -1). The authors' code marks them `_no_weight_decay`
(state-spaces/mamba, mamba_ssm/modules/mamba_simple.py and mamba2.py); Hugging Face's models carry no such mark and
transformers' Trainer decays A_log, D and the final norm.
"""

from __future__ import annotations

from torch import nn

# Leaf names that never decay, whatever their shape: the state-space parameters of every family (Mamba-3's too). Of H3's
# those that HazyResearch/H3 registers without decay, which leaves out C.
UNDECAYED = frozenset(
    {"A_log", "D", "dt_bias", "dt_proj_bias", "B_bias", "C_bias", "log_dt", "inv_A_real", "A_imag", "B"}
)


def decayed_parameter_names(model: nn.Module) -> list[str]:
    """Names of the parameters that decay: matrices of linear maps, convolutions, embeddings and adapters.

    Not the state-space parameters, not norms (recognised by their class name, or by having one dimension), not biases.
    """
    norms = {
        id(parameter)
        for module in model.modules()
        if "norm" in type(module).__name__.lower()
        for parameter in module.parameters(recurse=False)
    }
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim > 1
        and id(parameter) not in norms
        and not UNDECAYED.intersection(name.split("."))
        and not name.endswith("bias")
    ]
