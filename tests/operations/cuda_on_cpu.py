"""Our CUDA C++ compiled for a CPU by g++, in the place of `runtime_compile.compiled`: slow, and the same text."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Mapping
from pathlib import Path

import torch

from ssm_tune.kernels import runtime_compile

SHIM = Path(__file__).with_name("cuda_on_cpu.hpp")


class CpuKernel:
    """A kernel in a shared library; `launch` as that of `runtime_compile.Kernel`."""

    def __init__(self, library: Path) -> None:
        self._run = ctypes.CDLL(str(library)).run

    def launch(self, grid: tuple[int, int, int], arguments: ctypes.Structure) -> None:
        self._run(ctypes.byref(arguments), *grid)


class Compiler:
    """Compiles each kernel once, into `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kernels: dict[str, CpuKernel] = {}

    def __call__(
        self,
        name: str,
        files: tuple[str, ...],
        defines: Mapping[str, int],
        device: torch.device,
        threads: int,
        shared: int,
    ) -> CpuKernel:
        assert device.type == "cpu"
        label = "-".join([name, *(f"{key}{value}" for key, value in defines.items())])
        if label not in self.kernels:
            arguments = "ForwardArguments" if "forward" in name else "BackwardArguments"
            runner = f'extern "C" void run(const void* a, int x, int y, int z) {{ run_grid({name}, a, x, y, z); }}\n'
            text = (
                SHIM.read_text()
                + runtime_compile.source(files[1:])
                + runner.replace("run_grid", f"run_grid<const {arguments}>")
            )
            source, library = self.folder / f"{label}.cpp", self.folder / f"{label}.so"
            source.write_text(text)
            command = [
                "g++",
                "-std=c++17",
                "-O1",
                "-U_FORTIFY_SOURCE",
                "-fPIC",
                "-shared",
                "-Wno-unknown-pragmas",
                "-o",
                library,
                source,
            ]
            command += [f"-D{key}={value}" for key, value in defines.items()]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[:3000]
            self.kernels[label] = CpuKernel(library)
        return self.kernels[label]
