"""The cache by its older names, which scripts for decoding still use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers.utils.deprecation import deprecate_kwarg


def older_cache_names(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward whose `cache` may also be called past_key_values or cache_params, with transformers' warning.

    As another keyword it would be passed over, and each token be decoded as if nothing stood before it.
    """
    for name in ("past_key_values", "cache_params"):
        forward = deprecate_kwarg(name, "5.40.0", new_name="cache")(forward)
    return forward
