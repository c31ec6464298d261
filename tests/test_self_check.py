"""The self-check passes on patched models, and fails on stock ones that leak or compute another function."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from tiny import tiny_model

from ssm_tune import patch_model
from ssm_tune.recipe import RecipeError
from ssm_tune.self_check import check_model


@pytest.mark.parametrize("kind", ["mamba", "falcon_mamba", "mamba2", "bamba", "jamba"])
def test_patched_models_pass(kind):
    model = patch_model(tiny_model(kind))
    found = check_model(model, nullcontext, isolate=True)
    assert set(found) == {"training against evaluation", "packed against alone"} and max(found.values()) < 1e-4
    assert model.training


def test_a_leak_is_found():
    model = patch_model(tiny_model("mamba2"))
    mixer = model.backbone.layers[0].mixer
    inner = type(mixer).forward
    mixer.forward = lambda *args, seq_idx=None, **kwargs: inner(mixer, *args, **kwargs)
    with pytest.raises(RecipeError, match="packed against alone"):
        check_model(model, nullcontext, isolate=True)
    assert check_model(model, nullcontext, isolate=False)


def round_by_length(model):
    """Logits that are rounded coarsely, and in rows of another length otherwise."""
    head = model.lm_head
    inner = type(head).forward

    def forward(x):
        y = inner(head, x)
        generator = torch.Generator().manual_seed(x.shape[1])
        return y + 0.02 * y.std() * torch.randn(y.shape, generator=generator)

    head.forward = forward


def test_what_the_first_document_differs_by_is_rounding():
    model = patch_model(tiny_model("mamba2"))
    round_by_length(model)
    found = check_model(model, nullcontext, isolate=True)
    assert 0.015 < found["packed against alone"] < 0.05


def test_a_leak_is_found_behind_coarse_rounding():
    model = patch_model(tiny_model("mamba2"))
    round_by_length(model)
    mixer = model.backbone.layers[0].mixer
    inner = type(mixer).forward
    mixer.forward = lambda *args, seq_idx=None, **kwargs: inner(mixer, *args, **kwargs)
    with pytest.raises(RecipeError, match="packed against alone"):
        check_model(model, nullcontext, isolate=True)


def test_another_function_in_training_is_found():
    model = patch_model(tiny_model("falcon_mamba"))
    norm = model.backbone.layers[0].norm
    inner = type(norm).forward
    norm.forward = lambda x: inner(norm, x) * (2 if norm.training else 1)
    with pytest.raises(RecipeError, match="training against evaluation"):
        check_model(model, nullcontext, isolate=True)


def test_another_function_where_gradients_are_computed_is_found():
    model = patch_model(tiny_model("mamba2"))
    mixer = model.backbone.layers[0].mixer
    inner = type(mixer).forward
    mixer.forward = lambda *args, **kwargs: inner(mixer, *args, **kwargs) * (2 if torch.is_grad_enabled() else 1)
    with pytest.raises(RecipeError, match="training against evaluation"):
        check_model(model, nullcontext, isolate=True)


def test_numbers_that_are_not_finite_fail():
    model = patch_model(tiny_model("mamba"))
    with torch.no_grad():
        model.backbone.norm_f.weight.fill_(float("nan"))
    with pytest.raises(RecipeError, match="nan%"):
        check_model(model, nullcontext, isolate=True)
