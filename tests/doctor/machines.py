"""Machines made of stand-ins: packages on disk, with the metadata that pip would have left."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import stand_ins

NAMES = {"mamba_ssm": "mamba-ssm", "causal_conv1d": "causal-conv1d"}
BROKEN = "selective_scan_cuda.cpython-312-x86_64-linux-gnu.so: undefined symbol: _ZN3c104cuda9SetDeviceEa"


def install(
    folder: Path,
    package: str,
    version: str,
    *,
    instead: dict[str, str] | None = None,
    without: Sequence[str] = (),
    first_line: str = "",
) -> None:
    """Put a package into a folder of packages.

    instead: functions of `stand_ins` in the place of others, by name. without: modules that it lacks. first_line: of
    its __init__.py.
    """
    for name, module in stand_ins.modules().items():
        if name.partition(".")[0] != package or name in without:
            continue
        place = folder.joinpath(*name.split("."))
        place.mkdir(parents=True, exist_ok=True)
        lines = [first_line] if name == package else []
        for function in (n for n, value in vars(module).items() if callable(value) and not n.startswith("__")):
            lines.append(f"from stand_ins import {(instead or {}).get(function, function)} as {function}")
        (place / "__init__.py").write_text("\n".join(lines) + "\n")
    info = folder / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAMES[package]}\nVersion: {version}\n")


def none(folder: Path) -> None:
    """Neither package."""


def both(folder: Path) -> None:
    """Both, and they work."""
    install(folder, "mamba_ssm", "2.3.2.post1")
    install(folder, "causal_conv1d", "1.7.0")


def broken_abi(folder: Path) -> None:
    """mamba-ssm was compiled for another PyTorch."""
    install(folder, "mamba_ssm", "2.3.2.post1", first_line=f"raise ImportError({BROKEN!r})")
    install(folder, "causal_conv1d", "1.7.0")


def too_old(folder: Path) -> None:
    """A mamba-ssm without Mamba-2's scan, whose norms drop arguments."""
    instead = {"rmsnorm_fn": "norm_without_groups"}
    install(folder, "mamba_ssm", "1.2.0", instead=instead, without=["mamba_ssm.ops.triton.ssd_combined"])
    install(folder, "causal_conv1d", "1.7.0")


def next_version(folder: Path) -> None:
    """The next mamba-ssm, built by its defaults: without the Mamba-1 scan."""
    install(folder, "mamba_ssm", "2.4.0", instead={"selective_scan_fn": "selective_scan_not_built"})
    install(folder, "causal_conv1d", "1.7.0")


MACHINES = {"none": none, "both": both, "broken ABI": broken_abi, "too old": too_old, "next version": next_version}
