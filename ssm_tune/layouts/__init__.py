"""How weights lie on disk: find out which layout a checkpoint has, and read it as transformers' classes expect it."""

from ssm_tune.layouts.checkpoint import LAYOUTS, Checkpoint, detect, open_checkpoint
from ssm_tune.layouts.layout import Layout, Parallel
from ssm_tune.layouts.tensors import StoredTensor

__all__ = ["LAYOUTS", "Checkpoint", "Layout", "Parallel", "StoredTensor", "detect", "open_checkpoint"]
