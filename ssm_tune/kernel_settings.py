"""What a recipe's `kernels` section asks for, and what is chosen where it leaves it open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from ssm_tune.kernels import set_kernel_order
from ssm_tune.mixers.language_model import Backbone
from ssm_tune.recipe import Recipe, RecipeError
from ssm_tune.training_arguments import world_size

if TYPE_CHECKING:
    from trl import SFTConfig


def choose_kernels(recipe: Recipe) -> None:
    """Set the order of kernels for this process.

    Raises:
        RecipeError: an unknown kernel.
    """
    where = recipe.source or "recipe"
    try:
        set_kernel_order(recipe.kernels.order, recipe.kernels.required)
    except ValueError as error:
        raise RecipeError(f"{where}: {error}") from error


def choose_graphs(
    recipe: Recipe, model: nn.Module, arguments: SFTConfig, *, is_packed: bool, is_sharded: bool
) -> tuple[bool, list[str]]:
    """Whether blocks are recorded in CUDA graphs, and what is said of it where the recipe leaves it open.

    Chosen by itself where all batches have one shape and nothing stands in the way of recording: on one GPU, for packed
    rows of a model of state-space layers only. Not with checkpointing, whose memory a graph would keep, nor with
    quantised weights, which it would dequantise in a kernel that may not be recorded.
    """
    asked = recipe.kernels.graphs
    if asked is not None:
        return asked, []
    chosen = (
        arguments.device.type == "cuda"
        and world_size() == 1
        and not is_sharded
        and is_packed
        and not arguments.activation_checkpointing
        and not (recipe.model.load_in_4bit or recipe.model.load_in_8bit)
        and any(isinstance(module, Backbone) for module in model.modules())
    )
    why = "the GPU never waits for launches, and the memory of a step's activations is kept"
    return chosen, [f"kernels.graphs: true ({why})"] if chosen else []
