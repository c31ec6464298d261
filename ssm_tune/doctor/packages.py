"""The packages that ssm-tune stands on: imported to see whether they work, and held against what is known of them."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from dataclasses import dataclass

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from ssm_tune.doctor.report import Advice, PackageReport

# What pip calls a package, and what is imported. The last ones are optional.
NEEDED = {
    **{name: name for name in ("torch", "transformers", "peft", "trl", "accelerate", "datasets", "tokenizers")},
    **{name: name for name in ("safetensors", "huggingface_hub", "numba")},
}
OPTIONAL = {
    "triton": "triton",
    "mamba-ssm": "mamba_ssm",
    "causal-conv1d": "causal_conv1d",
    "kernels": "kernels",
    "bitsandbytes": "bitsandbytes",
}


@dataclass(frozen=True)
class KnownFault:
    """Versions of a package that go wrong in silence. `capability`: only on GPUs from this compute capability on."""

    package: str
    versions: str
    what: str
    fix: str
    capability: tuple[int, int] = (0, 0)


KNOWN_FAULTS = (
    KnownFault(
        "transformers",
        "<5.24",
        "its Mamba-2 norm ignores n_groups, so models such as Codestral evaluate to something else than they train",
        "pip install 'transformers>=5.24,<5.40'",
    ),
    KnownFault(
        "mamba-ssm",
        "<2.3",
        "it knows no norms inside its fused calls yet (Falcon-Mamba's, and those of Mamba-2's groups), and they are "
        "dropped in silence: stock models trained with it are not what they evaluate to",
        "pip install --no-build-isolation 'mamba-ssm>=2.3,<3'",
    ),
    KnownFault(
        "mamba-ssm",
        "<=2.3.2.post1",
        "its Mamba-3 kernel gives wrong values on Blackwell GPUs (state-spaces/mamba#997)",
        "pip install --no-build-isolation 'mamba-ssm>2.3.2.post1,<3'",
        capability=(10, 0),
    ),
    KnownFault(
        "causal-conv1d",
        "<1.4",
        "it knows no packed documents (seq_idx) in its backward",
        "pip install --no-build-isolation 'causal-conv1d>=1.6,<2'",
    ),
)


def look_at_packages() -> list[PackageReport]:
    """Import each package, and say what came of it."""
    ranges = our_ranges()
    return [_look_at(name, module, ranges.get(name, "")) for name, module in (NEEDED | OPTIONAL).items()]


def our_ranges() -> dict[str, str]:
    """The versions that ssm-tune declares, its extras' too; none where it runs from its source without installation."""
    try:
        lines = importlib.metadata.requires("ssm-tune") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    requirements = [Requirement(line) for line in lines]
    return {requirement.name: str(requirement.specifier) for requirement in requirements}


def _look_at(name: str, module: str, required: str) -> PackageReport:
    if not _is_there(module):
        return PackageReport(name, None, "absent", required=required)
    version = _version_of(name)
    try:
        found = importlib.import_module(module)
    except Exception as error:  # noqa: BLE001  (whatever an import raises is what the reader has to see)
        return PackageReport(name, version, "broken", f"{type(error).__name__}: {_one_line(error)}", required)
    version = version or vars(found).get("__version__")
    return PackageReport(name, version, "works", required=required)


def _is_there(module: str) -> bool:
    """Whether an import would find code; a mere folder of that name on the path is no package."""
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):  # put into sys.modules by hand
        return sys.modules.get(module) is not None
    return spec is not None and spec.origin is not None


def _version_of(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:500]


def judge_packages(packages: list[PackageReport], capability: tuple[int, int]) -> list[Advice]:
    """What of the packages is wrong, each with what to do. `capability`: of the GPU, (0, 0) without one."""
    found = []
    for package in packages:
        if package.status == "broken":
            found.append(
                Advice("problem", f"{package.name} is installed and broken: {package.error}", _repair(package))
            )
        elif package.status == "absent" and package.name in NEEDED:
            wanted = f"'{package.name}{package.required}'"
            found.append(Advice("problem", f"{package.name} is not installed", f"pip install {wanted}"))
        found += _judge_version(package, capability)
    return found


def _judge_version(package: PackageReport, capability: tuple[int, int]) -> list[Advice]:
    if package.version is None:
        return []
    try:
        version = Version(package.version)
    except InvalidVersion:
        return []
    public = Version(version.public)  # 2.13.0+cpu is a 2.13.0
    faults = [
        fault
        for fault in KNOWN_FAULTS
        if fault.package == package.name
        and SpecifierSet(fault.versions).contains(public, prereleases=True)
        and capability >= fault.capability
    ]
    if faults:
        return [Advice("problem", f"{package.name} {package.version}: {fault.what}", fault.fix) for fault in faults]
    if package.required and not SpecifierSet(package.required).contains(public, prereleases=True):
        how = "--no-build-isolation " if package.name in ("mamba-ssm", "causal-conv1d") else ""
        return [
            Advice(
                "problem",
                f"{package.name} {package.version} is outside of the versions that ssm-tune is made for "
                f"({package.required})",
                f"pip install {how}'{package.name}{package.required}'",
            )
        ]
    return []


def _repair(package: PackageReport) -> str:
    """The command for an error that an import raised."""
    wanted = f"'{package.name}{package.required}'"
    compiled = package.name in ("mamba-ssm", "causal-conv1d")
    missing = package.error.partition("No module named ")[2].strip("'\" ").partition(".")[0].strip("'")
    if missing and missing != OPTIONAL.get(package.name, package.name):
        return f"pip install {missing.replace('_', '-')}"
    if compiled:  # for the PyTorch and the CUDA that are here now, and from source, not from pip's cache
        return f"pip install --force-reinstall --no-deps --no-cache-dir --no-build-isolation {wanted}"
    return f"pip install --force-reinstall --no-cache-dir {wanted}"
