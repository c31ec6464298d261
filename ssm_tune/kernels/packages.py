"""Where the functions of mamba-ssm and causal-conv1d come from: the installed packages, or prebuilt ones of the Hub.

The prebuilt ones are those of Hugging Face's library `kernels`: compiled for many versions of PyTorch and CUDA, they
are downloaded at the first use instead of compiled for half an hour. Below their root they are laid out as the
packages are.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any


@dataclass(frozen=True)
class Package:
    """One of the two packages, from one source.

    `name`: what is imported where it is installed. `repo`, `version`: a kernel repository on the Hub and its major
    version; "" for the installed package.
    """

    name: str
    repo: str = ""
    version: int = 0

    def function(self, path: str) -> Callable[..., Any]:
        """A function by its path in the package: "ops.triton.layer_norm.rms_norm_fn".

        Raises:
            ImportError: it cannot be imported, or the library `kernels` cannot give it. Whatever else an import
                raises passes through.
            AttributeError: the package has no such function.
        """
        root = _prebuilt(self.repo, self.version) if self.repo else importlib.import_module(self.name)
        module, _, name = f"{root.__name__}.{path}".rpartition(".")
        return getattr(importlib.import_module(module), name)


MAMBA_SSM = Package("mamba_ssm")
CAUSAL_CONV1D = Package("causal_conv1d")
# The versions that were current in 2026; a later major version may have other signatures.
HUB_MAMBA_SSM = Package("mamba_ssm", "kernels-community/mamba-ssm", 5)
HUB_CAUSAL_CONV1D = Package("causal_conv1d", "kernels-community/causal-conv1d", 1)

# What became of each repository: its root module, or why there is none. A download that failed is not tried again for
# every operation: each try may wait for the network.
_loaded: dict[tuple[str, int], ModuleType | str] = {}


def _prebuilt(repo: str, version: int) -> ModuleType:
    found = _loaded.get((repo, version))
    if found is None:
        try:
            found = _load(repo, version)
        except ModuleNotFoundError as error:
            if error.name == "kernels":
                raise  # may be installed in the meantime
            found = _words(error)
        except (ImportError, OSError, RuntimeError, ValueError, *_network_errors()) as error:
            found = _words(error)
        _loaded[repo, version] = found
    if isinstance(found, str):
        raise ImportError(f"{repo} version {version}: {found}")
    return found


def _load(repo: str, version: int) -> ModuleType:
    import kernels

    if "get_kernel" not in vars(kernels):  # a folder of that name on the path
        raise ModuleNotFoundError("No module named 'kernels'", name="kernels")
    return kernels.get_kernel(repo, version=version)


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _network_errors() -> tuple[type[Exception], ...]:
    """What the HTTP client of huggingface_hub raises, whichever of the two it is; none if it was never loaded."""
    clients = [sys.modules[name] for name in ("httpx2", "httpx") if name in sys.modules]
    return tuple(client.HTTPError for client in clients)


@contextmanager
def without_downloads() -> Iterator[None]:
    """Inside, prebuilt kernels are taken from the local cache or not at all; what failed inside may be tried later."""
    from huggingface_hub import constants

    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    known = set(_loaded)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
        for key in set(_loaded) - known:
            if isinstance(_loaded[key], str):
                del _loaded[key]
