"""Units of blocks whose weights FSDP2 gathers, for CUDA graphs: gathered into the same memory each time.

What FSDP2 does round a call of the blocks (gather their weights, and, when backward has passed them, average their
gradients over the processes) it does round whatever is computed in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

Unit = list[nn.Module]


def units_of(blocks: Iterable[nn.Module]) -> list[Unit]:
    """The blocks by the units that they are sharded in, in their order; [] if they are not sharded."""
    units: dict[int, Unit] = {}
    for block in blocks:
        if not isinstance(block, FSDPModule):
            return []
        units.setdefault(id(fully_shard.state(block)), []).append(block)
    return list(units.values())


def gather_in_place(units: Sequence[Unit]) -> set[nn.Parameter]:
    """Gather all weights, and have them gathered into the same memory from here on, which is not given back.

    Returns:
        The whole parameters. Others of the blocks are not sharded.

    Raises:
        RuntimeError: this version of PyTorch keeps them in another way than those before.
    """
    gathered = set()
    for unit in units:
        first = unit[0]
        first.set_reshard_after_forward(False)  # it would be of no use now
        first.unshard()
        try:
            for sharded in fully_shard.state(first)._fsdp_param_group.fsdp_params:
                sharded.free_unsharded_param = _keep
                gathered.add(sharded.unsharded_param)
        except AttributeError as error:
            raise RuntimeError(f"FSDP2 of this PyTorch is not known: {error}") from error
    return gathered


def _keep() -> None:
    """Instead of giving memory back."""


def call_unit(unit: Unit, compute: Callable[[Tensor], Tensor], given: Tensor) -> Tensor:
    """compute(given), as what the unit's blocks make of it together."""
    *others, last = unit
    for block in others:
        given = block(given, instead=_same)
    return last(given, instead=compute)


def _same(given: Tensor) -> Tensor:
    return given
