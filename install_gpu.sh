#!/usr/bin/env bash
# Installs ssm-tune with the CUDA kernels into a virtual environment: ./install_gpu.sh [FOLDER, default .venv]
# Needs: Python 3.11 or newer, a CUDA toolkit (nvcc) of the version that PyTorch was built with, and half an hour for
# compiling where the kernels' projects have no ready wheel.
set -euo pipefail
cd "$(dirname "$0")"

venv=${1:-.venv}
python3 -m venv "$venv"
"$venv/bin/pip" install -c constraints.txt torch
"$venv/bin/pip" install -c constraints.txt -e '.[quant]'
# The kernels are compiled against the PyTorch that was just installed, not against one of their own choosing.
"$venv/bin/pip" install -c constraints.txt setuptools wheel ninja packaging hatchling editables
"$venv/bin/pip" install -c constraints.txt --no-build-isolation -e '.[kernels]'
"$venv/bin/python" - <<'PYTHON'
import torch

print(f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}, {torch.cuda.device_count()} GPUs here")
PYTHON
