"""CUDA C++ compiled at run time by NVRTC, which PyTorch's wheels for CUDA bring: no compiler, no headers are needed.

A kernel takes one argument, a structure, so that a launch from Python is one call of the driver. It is compiled and
loaded at the first question, for a GPU and a set of definitions; a CUDA graph can be captured after that.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

FOLDER = Path(__file__).parent / "cuda"

_INVALID_CONTEXT = 201  # this thread has not used the GPU yet
_MAX_DYNAMIC_SHARED, _CARVEOUT = 8, 9  # CU_FUNC_ATTRIBUTE_...: bytes of a block; per cent of what is shared or cache
_lock = threading.Lock()
_kernels: dict[tuple[object, ...], Kernel] = {}


class Kernel:
    """A kernel on one GPU, in a block of `threads`, with `shared` bytes of dynamic shared memory."""

    def __init__(self, function: ctypes.c_void_p, device: int, threads: int, shared: int) -> None:
        self._function, self._device, self._threads, self._shared = function, device, threads, shared
        self._launch = _driver().cuLaunchKernel

    def launch(self, grid: tuple[int, int, int], arguments: ctypes.Structure) -> None:
        """On the current stream; the GPU has to be the current one.

        Raises:
            RuntimeError: what the driver says.
        """
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        launch = (self._function, *grid, self._threads, 1, 1, self._shared, stream, parameters, None)
        result = self._launch(*launch)
        if result == _INVALID_CONTEXT:
            _make_current(self._device)
            result = self._launch(*launch)
        _check(result)


def compiled(
    name: str, files: tuple[str, ...], defines: Mapping[str, int], device: torch.device, threads: int, shared: int
) -> Kernel:
    """The kernel `name` of these files of `kernels/cuda`, one after the other; the same one for the same question.

    Raises:
        OSError: there is no NVRTC or no driver.
        RuntimeError: not a CUDA GPU, or NVRTC or the driver refuse; in their words.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        raise RuntimeError(f"{name}: CUDA C++ is compiled for NVIDIA's GPUs, not for {device}")
    index = torch.cuda.current_device() if device.index is None else device.index
    key = (name, index, shared, *defines.items())
    found = _kernels.get(key)
    if found is None:
        with _lock:
            found = _kernels.get(key)
            if found is None:
                binary = _compile(name, files, defines, torch.cuda.get_device_capability(index))
                found = _kernels[key] = Kernel(_load(binary, name, index, shared), index, threads, shared)
    return found


def source(files: tuple[str, ...]) -> str:
    """The text of these files of `kernels/cuda`."""
    return "\n".join((FOLDER / file).read_text(encoding="utf-8") for file in files)


def _compile(name: str, files: tuple[str, ...], defines: Mapping[str, int], capability: tuple[int, int]) -> bytes:
    nvrtc = _nvrtc()
    program = ctypes.c_void_p()
    text = source(files).encode()
    _check_nvrtc(nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, f"{name}.cu".encode(), 0, None, None))
    try:
        options = ["--gpu-architecture=sm_{}{}".format(*capability), "--std=c++17"]
        options += [f"-D{key}={value}" for key, value in defines.items()]
        array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if nvrtc.nvrtcCompileProgram(program, len(options), array):
            raise RuntimeError(f"NVRTC does not compile {name}: {_log(program)}")
        size = ctypes.c_size_t()
        _check_nvrtc(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        binary = ctypes.create_string_buffer(size.value)
        _check_nvrtc(nvrtc.nvrtcGetCUBIN(program, binary))
        return binary.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _log(program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    _check_nvrtc(_nvrtc().nvrtcGetProgramLogSize(program, ctypes.byref(size)))
    log = ctypes.create_string_buffer(size.value)
    _check_nvrtc(_nvrtc().nvrtcGetProgramLog(program, log))
    return log.value.decode(errors="replace")


def _check_nvrtc(result: int) -> None:
    if result:
        raise RuntimeError(f"NVRTC: {_nvrtc().nvrtcGetErrorString(result).decode()}")


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    major = (torch.version.cuda or "").partition(".")[0]
    folders = list(_bundled())
    for path in _in(folders, "libnvrtc-builtins.so.*"):  # which NVRTC looks for by name only
        with contextlib.suppress(OSError):
            ctypes.CDLL(path)
    problem = "there is none"
    # PyTorch's own wheels have it under a name of their own, the packages that they depend on under this one.
    patterns = (f"libnvrtc.so.{major}", f"libnvrtc-*.so.{major}")
    for path in (*_in(folders, patterns[0]), *_in(folders, patterns[1]), patterns[0]):
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            problem = str(error)
            continue
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        return library
    raise OSError(f"no NVRTC of CUDA {major}: {problem}")


def _bundled() -> Iterator[Path]:
    """Folders of libraries of the packages that PyTorch depends on, and of PyTorch itself."""
    for package, pattern in (("nvidia", "*/lib"), ("torch", "lib")):
        spec = importlib.util.find_spec(package)
        for folder in [] if spec is None else spec.submodule_search_locations or []:
            yield from sorted(Path(folder).glob(pattern))


def _in(folders: list[Path], pattern: str) -> list[str]:
    return [str(path) for folder in folders for path in sorted(folder.glob(pattern))]


@functools.cache
def _driver() -> ctypes.CDLL:
    library = ctypes.CDLL("libcuda.so.1")
    count, pointer = ctypes.c_uint, ctypes.c_void_p
    library.cuLaunchKernel.argtypes = [pointer, *[count] * 7, pointer, pointer, pointer]
    return library


def _load(binary: bytes, name: str, device: int, shared: int) -> ctypes.c_void_p:
    driver = _driver()
    _make_current(device)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _check(driver.cuModuleLoadData(ctypes.byref(module), binary))
    _check(driver.cuModuleGetFunction(ctypes.byref(function), module, name.encode()))
    if shared:
        _check(driver.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared))
        _check(driver.cuFuncSetAttribute(function, _CARVEOUT, 100))
    return function


def _make_current(device: int) -> None:
    """PyTorch's context of the GPU, for this thread."""
    driver, handle, context = _driver(), ctypes.c_int(), ctypes.c_void_p()
    torch.cuda.init()
    _check(driver.cuDeviceGet(ctypes.byref(handle), device))  # counted as PyTorch counts
    _check(driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle))
    _check(driver.cuCtxSetCurrent(context))


def _check(result: int) -> None:
    if result:
        words = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(words))
        raise RuntimeError(f"CUDA error {result}: {words.value.decode() if words.value else 'unknown'}")
