"""A model over several processes by FSDP2: what is wrapped, in which precision, and what stays whole on every rank.

Blocks that follow each other are one unit, up to some hundred megabytes: a unit costs Python one or two milliseconds a
step, which 48 blocks would pay 48 times.

accelerate's own FSDP2 preparation is not used. It knows accelerator devices only (with `use_cpu` it runs DDP without a
word), wraps mamba's mixers beside its blocks, casts the residual stream to bfloat16 at every block, and leaves no place
for weights that several blocks share. Its configs are: `Sharding.from_environment` reads what its launcher put into the
environment. The sharded model is given to transformers' Trainer as one that was sharded when it was loaded, which wraps
nothing then.

Precision, with training.bf16: blocks are gathered and computed in bfloat16; embeddings, the last norm and the head in
float32, so that the residual stream is float32 between blocks as it is without sharding; the state-space parameters
(A_log, D, dt_bias: a thousandth of the weights) are not sharded at all, computed in float32, and their gradients are
averaged by `average_replicated`. Masters, gradient reduction and optimizer state are float32.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ssm_tune.families import Family, family_of
from ssm_tune.recipe import RecipeError
from ssm_tune.ssm_parameters import base_name

logger = logging.getLogger(__name__)

_WANTED = "SSM_TUNE_SHARDED"
_TRUE = ("true", "1", "yes")
# torch's own, whose kernels take shards. Others (bitsandbytes', Adafactor) fail at their first step, or need sums over
# whole tensors that they would take over a shard.
_OPTIMIZERS = ("adamw_torch_fused", "adamw_torch", "sgd", "adagrad", "rmsprop")
# Of a unit's gathered weights. Two units are gathered at a time, and gradients in float32 take twice of it.
_UNIT_BYTES = 400 * 2**20


@dataclass(frozen=True)
class Sharding:
    """How to shard. reshard: free a block's whole weights after its forward pass, and gather them again for backward.
    offload: keep weights, gradients and optimizer state in the host's memory. checkpointing: recompute blocks in
    backward. replicas: groups that hold the whole model each; 1 shards over all processes, more is HSDP. unit_bytes:
    the size, about, that blocks are put together to; see `_UNIT_BYTES`."""

    reshard: bool = True
    offload: bool = False
    checkpointing: bool = False
    replicas: int = 1
    unit_bytes: int = _UNIT_BYTES

    @classmethod
    def from_environment(cls) -> Sharding | None:
        """What accelerate's launcher asks for in the environment; None if it is not FSDP.

        Raises:
            RecipeError: something is asked for that would not be done.
        """
        if _flag("ACCELERATE_USE_FSDP"):
            # accelerate and transformers must not shard as well: from here on it is ours.
            os.environ[_WANTED] = "true"
            os.environ["ACCELERATE_USE_FSDP"] = "false"
            os.environ.pop("ACCELERATE_USE_PARALLELISM_CONFIG", None)
        if not _flag(_WANTED):
            return None
        _refuse_others()
        return cls(
            reshard=_flag("FSDP_RESHARD_AFTER_FORWARD", default="true"),
            offload=_flag("FSDP_OFFLOAD_PARAMS"),
            checkpointing=_flag("FSDP_ACTIVATION_CHECKPOINTING"),
            replicas=_number("PARALLELISM_CONFIG_DP_REPLICATE_SIZE"),
        )


def describe_processes(sharding: Sharding | None, processes: int) -> str | None:
    """How a run is spread, for the table at start; None: one process, nothing sharded."""
    if sharding is None:
        return f"{processes} processes, each with the whole model (DDP)" if processes > 1 else None
    whole = f", {sharding.replicas} copies of {processes // sharding.replicas} shards" if sharding.replicas > 1 else ""
    return (
        f"{processes} processes, sharded by blocks (FSDP2{whole})"
        + ("" if sharding.reshard else ", weights kept whole between forward and backward")
        + (", weights and optimizer in host memory" if sharding.offload else "")
    )


def _flag(name: str, default: str = "false") -> bool:
    return os.environ.get(name, default).lower() in _TRUE


def _number(name: str) -> int:
    value = os.environ.get(name, "1")
    return int(value) if value.isdigit() and int(value) > 0 else 1


def _refuse_others() -> None:
    """What accelerate's config can say and would be dropped here: told, each with what to write instead."""
    mistakes = []
    if os.environ.get("FSDP_VERSION", "2") != "2":
        mistakes.append("accelerate config: fsdp_version: FSDP1 is not supported. Set fsdp_version: 2.")
    policy = os.environ.get("FSDP_AUTO_WRAP_POLICY", "TRANSFORMER_BASED_WRAP")
    if policy not in ("TRANSFORMER_BASED_WRAP", "None"):
        mistakes.append(f"accelerate config: fsdp_auto_wrap_policy: {policy}: blocks are wrapped. Leave it out.")
    classes = os.environ.get("FSDP_TRANSFORMER_CLS_TO_WRAP", "None")
    if classes not in ("None", ""):
        mistakes.append(
            f"accelerate config: fsdp_transformer_layer_cls_to_wrap: {classes}: the family says what is wrapped, by "
            "blocks. Leave it out."
        )
    if os.environ.get("FSDP_IGNORED_MODULES", "None") not in ("None", ""):
        mistakes.append("accelerate config: fsdp_ignored_modules: not supported. Leave it out.")
    if _flag("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"):
        mistakes.append("accelerate config: fsdp_activation_checkpointing_offload: not supported. Leave it out.")
    for name in ("TP", "CP", "SP"):
        if _number(f"PARALLELISM_CONFIG_{name}_SIZE") > 1:
            mistakes.append(
                f"accelerate config: parallelism_config_{name.lower()}_size: a state-space layer is not split inside "
                "itself. Leave it out; blocks are sharded over all processes."
            )
    if mistakes:
        raise RecipeError(mistakes)


def check_optimizer(sharding: Sharding | None, optimizer: str) -> None:
    """Raises RecipeError if this optimizer (training.optim, as SFTConfig has it) cannot train sharded parameters."""
    name = getattr(optimizer, "value", optimizer)  # SFTConfig has an enum, whose str() is another word
    if sharding is not None and name not in _OPTIMIZERS:
        raise RecipeError(
            f"training.optim: {name} does not know sharded parameters. Use {', '.join(_OPTIMIZERS[:-1])} or "
            f"{_OPTIMIZERS[-1]} (their state is sharded too), or --accelerate ddp."
        )


def make_mesh(sharding: Sharding, device_type: str) -> DeviceMesh:
    """The processes as a line of shards, or as replicas x shards: ranks of one replica lie side by side.

    Raises:
        RecipeError: the number of processes is no multiple of the replicas.
    """
    world = dist.get_world_size()
    if sharding.replicas == 1:
        return init_device_mesh(device_type, (world,), mesh_dim_names=("shard",))
    if world % sharding.replicas:
        raise RecipeError(
            f"accelerate config: parallelism_config_dp_replicate_size: {world} processes are not "
            f"{sharding.replicas} equal groups. Change --processes, or the size."
        )
    shape = (sharding.replicas, world // sharding.replicas)
    return init_device_mesh(device_type, shape, mesh_dim_names=("replicate", "shard"))


def shard_model(model: nn.Module, sharding: Sharding, device: torch.device, *, bf16: bool) -> None:
    """Shard a model in place: its parameters become DTensors on `device`, except those that stay whole (replicated).

    Args:
        model: a patched causal LM, or a PEFT model round one, on the CPU (or on `device`); every rank holds the same
            weights.
        bf16: compute in bfloat16, under autocast; see the module's text for what stays float32.

    Raises:
        RecipeError: the processes do not divide into the config's replicas.
    """
    # Blocks hand on views, of their input or of a product, and nobody changes these in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    family = family_of(base.config.model_type)
    compute = torch.bfloat16 if bf16 else None
    whole = set(_kept_whole(model, family, compute))
    for parameter in whole:
        parameter.data = parameter.data.to(device)
    common: dict[str, Any] = {
        "mesh": make_mesh(sharding, device.type),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda") if sharding.offload else OffloadPolicy(),
        "ignored_params": whole,
    }
    full = _precision(None)
    precision = _precision(compute)
    for group in _shared_groups(base, family):
        fully_shard(group, mp_policy=precision, reshard_after_forward=sharding.reshard, **common)
    units = list(_units(_blocks(base, family), whole, compute, sharding.unit_bytes))
    for unit in units:
        # Backward begins with the last one: freed after its forward, it would be gathered again at once.
        reshard = sharding.reshard and unit is not units[-1]
        fully_shard(unit, mp_policy=precision, reshard_after_forward=reshard, **common)
    for unit, following in pairwise(units):  # in backward FSDP2 does so by itself
        unit[0].set_modules_to_forward_prefetch([following[0]])
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    if head is not None and _weight(head) is not _weight(embeddings):  # tied ones belong to the root, with the head
        fully_shard(embeddings, mp_policy=full, reshard_after_forward=sharding.reshard, **common)
    fully_shard(model, mp_policy=full, **common)


def _blocks(model: nn.Module, family: Family) -> list[nn.Module]:
    """The model's blocks in their order, without those inside another.

    Raises:
        RecipeError: there are none.
    """
    blocks = [module for module in model.modules() if type(module).__name__ in family.blocks]
    if not blocks:
        raise RecipeError(f"model: no {' or '.join(family.blocks)} found to shard in this {family.model_type} model.")
    inner = {id(module) for block in blocks for module in block.modules() if module is not block}
    return [block for block in blocks if id(block) not in inner]


def _units(
    blocks: list[nn.Module], whole: set[nn.Parameter], compute: torch.dtype | None, most: int
) -> Iterator[list[nn.Module]]:
    """Blocks that follow each other, put together to about equal sizes of about `most` bytes at most."""
    sizes = [sum(_gathered_bytes(p, compute) for p in block.parameters() if p not in whole) for block in blocks]
    total = max(sum(sizes), 1)
    count = -(-total // most)
    middles = [end - size / 2 for size, end in zip(sizes, accumulate(sizes), strict=True)]
    for _, unit in groupby(zip(middles, blocks, strict=True), lambda pair: int(pair[0] * count / total)):
        yield [block for _, block in unit]


def _gathered_bytes(parameter: nn.Parameter, compute: torch.dtype | None) -> int:
    dtype = compute if compute is not None and parameter.is_floating_point() else parameter.dtype
    return parameter.numel() * dtype.itemsize


def _precision(compute: torch.dtype | None) -> MixedPrecisionPolicy:
    # Inputs and outputs of a block are left alone: they are the residual stream.
    return MixedPrecisionPolicy(
        param_dtype=compute, reduce_dtype=torch.float32, output_dtype=None, cast_forward_inputs=False
    )


def _weight(module: nn.Module) -> nn.Parameter | None:
    return next(iter(module.parameters()), None)


def _kept_whole(model: nn.Module, family: Family, compute: torch.dtype | None) -> Iterator[nn.Parameter]:
    """The recurrence's parameters; weights packed as integers, which FSDP2 cannot gather; and those packed as floats of
    another dtype than blocks are gathered in, which it would round."""
    for name, parameter in model.named_parameters():
        rounded = hasattr(parameter, "quant_state") and compute not in (None, parameter.dtype)
        if family.is_ssm_parameter(base_name(name)) or not parameter.is_floating_point() or rounded:
            yield parameter


def _shared_groups(model: nn.Module, family: Family) -> list[list[nn.Module]]:
    """The modules whose weights several blocks use, those with common weights together: each becomes one unit."""
    found = [module for name, module in model.named_modules() if name.rpartition(".")[2] in family.shared]
    groups: list[tuple[list[nn.Module], set[int]]] = []
    for module in found:
        mine = {id(parameter) for parameter in module.parameters()}
        members = [module]
        for group in [group for group in groups if group[1] & mine]:
            groups.remove(group)
            members, mine = [*group[0], *members], mine | group[1]
        groups.append((members, mine))
    return [members for members, _ in groups]


def is_sharded(model: nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; a plain tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def split_groups(optimizer: torch.optim.Optimizer) -> None:
    """Give parameters that are not sharded groups of their own: one optimizer kernel takes DTensors or plain tensors,
    never both."""
    for group in list(optimizer.param_groups):
        plain = [parameter for parameter in group["params"] if not isinstance(parameter, DTensor)]
        if plain and len(plain) < len(group["params"]):
            group["params"] = [parameter for parameter in group["params"] if isinstance(parameter, DTensor)]
            optimizer.add_param_group({**group, "params": plain})


def replicated(model: nn.Module) -> list[nn.Parameter]:
    """Trained parameters of a sharded model that every rank holds whole."""
    return [
        parameter for parameter in model.parameters() if parameter.requires_grad and not isinstance(parameter, DTensor)
    ]


@torch.no_grad()
def average_replicated(parameters: Iterable[nn.Parameter]) -> None:
    """Average the gradients of parameters that are held whole over all ranks, in one message, in float32."""
    parameters = list(parameters)
    if not parameters or dist.get_world_size() == 1:
        return
    for parameter in parameters:
        if parameter.grad is None:  # on this rank; all must send the same
            parameter.grad = torch.zeros_like(parameter)
    flat = torch.cat([parameter.grad.float().flatten() for parameter in parameters])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    parts = flat.split([parameter.numel() for parameter in parameters])
    averages = [part.view_as(parameter) for parameter, part in zip(parameters, parts, strict=True)]
    torch._foreach_copy_([parameter.grad for parameter in parameters], averages)


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float, device: torch.device) -> torch.Tensor:
    """Scale all gradients so that their common norm is at most `max_norm`; returns the norm before, on `device`.

    torch's own function takes sharded or plain tensors, on one device; here both occur, and with offloading both
    devices.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    sharded = [gradient for gradient in gradients if isinstance(gradient, DTensor)]
    shards = [gradient.to_local() for gradient in sharded]
    plain = [gradient for gradient in gradients if not isinstance(gradient, DTensor)]
    total = _squares(shards, device)
    if sharded:
        mesh = sharded[0].device_mesh
        dist.all_reduce(total, group=mesh.get_group("shard"))  # replicas hold the same
    norm = (total + _squares(plain, device)).sqrt()
    if max_norm != float("inf"):
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for tensors in (shards, plain):  # each on one device
            if tensors:
                torch._foreach_mul_(tensors, scale.to(tensors[0].device))
    return norm


def _squares(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    parts = [tensor for tensor in tensors if tensor.numel()]
    if not parts:
        return torch.zeros((), device=device)
    norms = torch._foreach_norm([part.float() for part in parts])
    return torch.stack([norm.to(device) for norm in norms]).square().sum()


@torch.no_grad()
def gather_state(model: nn.Module, *, trained_only: bool) -> dict[str, torch.Tensor]:
    """The whole weights, for rank 0, in host memory; {} on the other ranks. Called by all of them.

    One tensor is whole on a device at a time. Names of one tied parameter share one tensor, which is saved once then.
    """
    keep = dist.get_rank() == 0
    parameters = dict(model.named_parameters(remove_duplicate=False))
    first: dict[int, str] = {}  # a parameter's id and its first name
    whole = {}
    for name, value in model.state_dict().items():
        parameter = parameters.get(name)
        if trained_only and (parameter is None or not parameter.requires_grad):
            continue
        known = name if parameter is None else first.setdefault(id(parameter), name)
        if known == name and isinstance(value, DTensor):
            value = value.to(value.device_mesh.device_type).full_tensor()
        if keep:
            whole[name] = value.cpu() if known == name else whole[known]
    return whole
