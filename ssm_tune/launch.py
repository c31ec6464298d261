"""Several processes: an accelerate config by name or by file, handed to accelerate's own launcher."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ssm_tune.recipe import RecipeError
from ssm_tune.recipe_checks import nearest
from ssm_tune.shipped import shipped, shipped_names

if TYPE_CHECKING:
    import argparse

# torch's launcher gives processes half a minute to end after a signal; a checkpoint may take longer to write.
_SHUTDOWN_SECONDS = "300"
_CPU_PROCESSES = 2
# Where accelerate's launcher writes a key of its config to, if not under the key's own name.
_VARIABLES = {"fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP"}
# Tells the processes that the launcher speaks of those that were killed.
_LAUNCHER = "SSM_TUNE_LAUNCHER"


def launch(
    command: str, arguments: Sequence[str], *, accelerate: str | None = None, processes: int | None = None
) -> int:
    """Run `python -m ssm_tune COMMAND ARGUMENTS` in several processes; gives back the exit code.

    accelerate: the name of a shipped config or a YAML file; None: `ddp`. processes: of all machines together; None: as
    many as there are GPUs, or what the config says, or 2 on a CPU. Without a GPU, `ddp` means gloo on the CPU.

    Raises:
        RecipeError: no such config, not a config, or one that cannot work on this machine.
    """
    path = find_config(accelerate or "ddp")
    config = _read_config(path)
    if processes is not None and processes < 1:
        raise RecipeError(f"--processes: must be at least 1, not {processes}")
    import torch

    gpus = torch.cuda.device_count()
    _check_machine(path, config, gpus, processes)
    machines = config.get("num_machines", 1)
    on_gpus = 0 if config.get("use_cpu") else gpus * machines
    count = processes or config.get("num_processes") or on_gpus or max(_CPU_PROCESSES, machines)
    if not gpus or config.get("use_cpu"):
        # Without it the processes would not find each other: accelerate looks for gloo only where the CPU is asked for.
        os.environ["ACCELERATE_USE_CPU"] = "true"
    launcher = ["--config_file", str(path), "--num_processes", str(count), *_place(config)]
    return _run([*launcher, "-m", "ssm_tune", command, *arguments])


def adopt(accelerate: str | None, processes: int | None) -> None:
    """Follow an accelerate config in a process that another launcher (torchrun, Slurm) has started already.

    Raises:
        RecipeError: no such config; `processes` is not how many there are.
    """
    started = int(os.environ["WORLD_SIZE"])
    if processes is not None and processes != started:
        raise RecipeError(f"--processes: {processes}, but {started} were started. Leave it out; the launcher says it")
    if accelerate is None:
        return
    path = find_config(accelerate)
    config = _read_config(path)
    import torch

    _check_machine(path, config, torch.cuda.device_count(), started)
    if config.get("use_cpu"):
        os.environ["ACCELERATE_USE_CPU"] = "true"
    if config["distributed_type"] == "FSDP":
        os.environ["ACCELERATE_USE_FSDP"] = "true"
    for section in ("fsdp_config", "parallelism_config"):
        for key, value in (config.get(section) or {}).items():
            os.environ.setdefault(_VARIABLES.get(key, key.upper()), str(value))


def find_config(name_or_file: str) -> Path:
    """The accelerate config of this name, or this file.

    Raises:
        RecipeError: there is neither.
    """
    path = Path(name_or_file).expanduser()
    if path.is_file():
        return path
    names = shipped_names("accelerate_configs")
    if name_or_file in names:
        return shipped("accelerate_configs", f"{name_or_file}.yaml")
    listed = f" Shipped configs: {', '.join(names)}"
    raise RecipeError(
        f"--accelerate {name_or_file}: is neither a file nor a config.{nearest(name_or_file, names, listed)}"
    )


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise RecipeError(f"--accelerate {path}: cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(config, dict) or "distributed_type" not in config:
        raise RecipeError(
            f"--accelerate {path}: is not an accelerate config (it has no distributed_type). "
            "Make one with `accelerate config --config_file FILE`, or name a shipped one"
        )
    from accelerate.commands.config.config_args import load_config_from_file

    try:
        load_config_from_file(str(path))
    except (ValueError, TypeError, KeyError) as error:
        raise RecipeError(f"--accelerate {path}: accelerate does not read it: {error}") from error
    return config


def _check_machine(path: Path, config: dict[str, Any], gpus: int, processes: int | None) -> None:
    kind = config["distributed_type"]
    if kind not in ("NO", "MULTI_GPU", "MULTI_CPU", "FSDP"):
        raise RecipeError(
            f"--accelerate {path}: distributed_type {kind} is not supported; a model is sharded by FSDP. "
            "Use --accelerate fsdp2"
        )
    if kind == "FSDP" and not gpus and not config.get("use_cpu"):
        raise RecipeError(
            f"--accelerate {path.stem}: sharding over GPUs, and there is none to use here. "
            "Use --accelerate ddp, or fsdp2_cpu to try sharding on the CPU"
        )
    machines = config.get("num_machines", 1)
    if processes is not None and processes % machines:
        raise RecipeError(f"--processes: {processes} processes are not equally many on {machines} machines")
    here = (processes or config.get("num_processes") or 0) // config.get("num_machines", 1)
    if gpus and here > gpus and not config.get("use_cpu"):
        raise RecipeError(f"--processes: {here} processes on this machine, which has {gpus} GPUs")


def _place(config: dict[str, Any]) -> list[str]:
    """Which machine this is. A cluster's scheduler says it in the environment; the config says it otherwise."""
    if config.get("num_machines", 1) == 1:
        return ["--main_process_port", "0"]  # a free one
    names = {
        "--machine_rank": ("NODE_RANK", "SLURM_NODEID"),
        "--main_process_ip": ("MASTER_ADDR",),
        "--main_process_port": ("MASTER_PORT",),
    }
    keys = {"--machine_rank": "machine_rank", "--main_process_ip": "main_process_ip"}
    found: list[str] = []
    for option, variables in names.items():
        value = next((os.environ[name] for name in variables if name in os.environ), None)
        if value is not None:
            found += [option, value]
        elif option in keys and config.get(keys[option]) is None:
            raise RecipeError(
                f"--accelerate: {config['num_machines']} machines: {variables[0]} is not set. Give every launcher "
                "NODE_RANK (0, 1, ...), MASTER_ADDR (the first machine) and MASTER_PORT; examples/slurm.sh does."
            )
    return found


def _run(launcher_arguments: list[str]) -> int:
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ[_LAUNCHER] = "1"
    importlib.import_module("torch.distributed.run")  # makes the loggers that are quietened below
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", _SHUTDOWN_SECONDS)
    parsed: argparse.Namespace = launch_command_parser().parse_args(launcher_arguments)
    # The processes have told what went wrong themselves; the launcher's own table of it would only bury that.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):  # each has a level of its own
            logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        launch_command(parsed)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _explain(rank, failure.exitcode)
    except subprocess.CalledProcessError as error:  # accelerate's launcher of a single process
        return _explain(0, error.returncode)
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def _explain(rank: int, code: int) -> int:
    if code >= 0:
        return code
    name = signal.Signals(-code).name
    cause = " (the system ends processes so when memory runs out)" if -code == signal.SIGKILL else ""
    print(
        f"process {rank} was ended by {name}{cause}; the others were stopped. If a checkpoint was written, the same "
        "command with --resume goes on from it",
        file=sys.stderr,
    )
    return 128 - code
