#!/usr/bin/env bash
# Generates text with speculative decoding, in a virtual environment that it makes on the
# first call; on the GPU when an NVIDIA driver answers, else on the CPU.
#
#   bash scripts/demo.sh [CHECKPOINT FOLDER] [FLAG OF generate.py...]
#
# Without a folder it takes the checkpoint that is embedded in the package, without a
# --prompt one of its own. A relative folder is relative to where it is called from.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/venv.sh
. "$root/scripts/venv.sh"

checkpoint=$root/metrale_jax/assets/demo
if [[ $# -gt 0 && $1 != -* ]]; then
  checkpoint=$1
  shift
fi
if [[ ! -f $checkpoint/config.json ]]; then
  echo "No checkpoint in $checkpoint (it has no config.json);" \
    "name the folder of one: bash scripts/demo.sh FOLDER" >&2
  exit 2
fi

flags=(--checkpoint "$checkpoint" "$@")
if [[ " ${flags[*]}" != *" --prompt"* ]]; then
  flags+=(--prompt "def fibonacci(n):")
fi

extras=()
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
  extras+=(cuda12)
fi
python=$(supported_python)
# An empty array counts as unset in the bash of macOS.
(cd -- "$root" && prepare_venv .venv "$python" ${extras[@]+"${extras[@]}"})
exec "$root/.venv/bin/python" "$root/scripts/generate.py" "${flags[@]}"
