"""Whether a module may be passed by: its parameters used, and its computation joined to others, without a call."""

from __future__ import annotations

from torch import nn

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_FSDP = "torch.distributed.fsdp"


def is_watched(module: nn.Module) -> bool:
    """Whether somebody has to see a module called: hooks, a forward of its own, and accelerate's, which brings weights
    from elsewhere."""
    own = vars(module)
    return any(own[name] for name in _HOOKS) or "forward" in own or "_hf_hook" in own


def is_only_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 is all that watches a module: it gathers weights round a call, whatever goes in and comes out."""
    own = vars(module)
    hooks = [hook for name in _HOOKS for hook in own[name].values()]
    mine = all((getattr(hook, "__module__", None) or "").startswith(_FSDP) for hook in hooks)
    return bool(hooks) and mine and not ("forward" in own or "_hf_hook" in own)
