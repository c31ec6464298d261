"""Training forwards for transformers' state-space models, on top of `ssm_tune.kernels`.

`patch_model` changes the class of mixers (and of what passes document borders down to them) to one of ours under the
same name; `unpatch_model` takes it back. One file per kind of mixer; `documents.py` is where borders are found.
"""

from ssm_tune.mixers.patch import is_patched, patch_model, unpatch_model

__all__ = ["is_patched", "patch_model", "unpatch_model"]
