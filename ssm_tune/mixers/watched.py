"""Whether a module may be passed by: its parameters used, and its computation joined to others, without a call."""

from __future__ import annotations

from torch import nn

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def is_watched(module: nn.Module) -> bool:
    """Whether somebody has to see a module called: hooks, a forward of its own, and accelerate's, which brings weights
    from elsewhere."""
    own = vars(module)
    return any(own[name] for name in _HOOKS) or "forward" in own or "_hf_hook" in own
