"""Reading torch.save files that hold more than tensors, without running anything that is in them.

A pickle names the functions and classes it is made of, and unpickling calls them. Here only those that make tensors are
found; in the place of any other stands a class that keeps what it is given and does nothing (`Inert`).
"""

from __future__ import annotations

import collections
import pickle
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from ssm_tune.recipe import RecipeError

# What tensors, and tables of them, are made of; and plain containers.
_KNOWN: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch._utils", "_rebuild_tensor"): torch._utils._rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    **{
        (module, name): kind
        for module in ("builtins", "__builtin__")
        for name, kind in (("set", set), ("complex", complex))
    },
}
# Of no use in a checkpoint but to run code: such a file is refused whole, though it would do nothing here.
_HOSTILE = {
    *("os", "posix", "nt", "subprocess", "sys", "shutil", "importlib", "runpy", "socket", "ctypes", "pty", "code"),
    *(
        "codeop",
        "commands",
        "webbrowser",
        "marshal",
        "pickle",
        "_pickle",
        "multiprocessing",
        "asyncio",
        "http",
        "urllib",
    ),
}
_HOSTILE_BUILTINS = {"eval", "exec", "compile", "open", "input", "__import__", "breakpoint", "execfile", "apply"}


class Inert:
    """Stands for an object whose class is not loaded. `origin` names it; `arguments` and `state` are what it was given.

    Whatever unpickling asks of it (calls, items, attributes), it keeps the last answer of the pickle and does nothing.
    """

    origin: ClassVar[str] = ""
    arguments: tuple[Any, ...]
    state: Any

    def __new__(cls, *arguments: Any, **keywords: Any) -> Inert:
        made = object.__new__(cls)
        made.arguments, made.state = arguments, None
        return made

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def __call__(self, *arguments: Any, **keywords: Any) -> Inert:
        return Inert(*arguments)

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def append(self, value: Any) -> None:
        """What a pickled list would be given."""

    def extend(self, values: Any) -> None:
        """As append."""

    def add(self, value: Any) -> None:
        """What a pickled set would be given."""


def read_inertly(path: Path) -> Any:
    """What a torch.save file holds; its tensors mapped into memory where its format allows that.

    Raises:
        RecipeError: it names code to run, or is truncated, corrupt or no such file.
    """
    _refuse_programs(path)
    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=False, pickle_module=_PICKLE, mmap=True)
        except RuntimeError as error:
            if "mmap can only be used" not in str(error):
                raise
            # The format before torch 1.6.
            return torch.load(path, map_location="cpu", weights_only=False, pickle_module=_PICKLE)
    except _Hostile as error:
        raise RecipeError(
            f"{path} names code to run ({error}), which no checkpoint needs. Nothing was run. Do not use this file."
        ) from error
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, *_CORRUPT) as error:
        line = (str(error) or type(error).__name__).splitlines()[0]
        raise RecipeError(f"{path} is truncated or corrupt ({line}). Fetch it again.") from error


class _Hostile(Exception):
    """A global that only an attack has."""


class _Unpickler(pickle._Unpickler):
    """Python's own in Python, which unlike the one in C lets what a state is put into be looked at."""

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def load_build(self) -> None:
        """Give an object its state: not a function or a class, which the whole process shares."""
        if not isinstance(self.stack[-2], Inert | collections.OrderedDict | torch.Tensor):
            raise _Hostile(f"a state for {self.stack[-2]!r}")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        root = module.split(".")[0]
        if root in _HOSTILE or (root in ("builtins", "__builtin__") and name in _HOSTILE_BUILTINS):
            raise _Hostile(f"{module}.{name}")
        if (module, name) in _KNOWN:
            return _KNOWN[module, name]
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        return type(name.rsplit(".", 1)[-1], (Inert,), {"origin": f"{module}.{name}"})


def _load(file: Any, **keywords: Any) -> Any:
    return _Unpickler(file, **keywords).load()


# As much of the module `pickle` as torch.load asks for.
_PICKLE = SimpleNamespace(__name__=__name__, Unpickler=_Unpickler, load=_load)
_CORRUPT = (ValueError, KeyError, TypeError, AttributeError, IndexError, AssertionError, ImportError, MemoryError)


def _refuse_programs(path: Path) -> None:
    """torch.load runs a TorchScript archive, whatever its pickle_module."""
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            names = {name.split("/", 1)[-1] for name in archive.namelist()}
    except (OSError, zipfile.BadZipFile):
        return  # torch says what is wrong with it
    if "constants.pkl" in names:
        raise RecipeError(f"{path} is a TorchScript program, not a checkpoint.")
