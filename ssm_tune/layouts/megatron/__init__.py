"""Megatron-LM's layout of Mamba-2 and its hybrids: mp_rank_XX[_YYY]/model_optim_rng.pt below iter_XXXXXXX or release.

What Megatron's tools/checkpoint/hybrid_conversion.py reads and writes (its `torch` checkpoint format): one pickle for
each tensor-parallel rank XX and pipeline stage YYY, with the rank's tensors and the arguments of training.
"""

from ssm_tune.layouts.megatron.files import LAYOUT

__all__ = ["LAYOUT"]
