#!/usr/bin/env bash
# Runs the main job in a virtual environment that it makes on the first call; on the GPU
# when an NVIDIA driver answers, else on the CPU.
#
#   bash scripts/demo.sh [CHECKPOINT FOLDER] [FLAG...]
#
# Generates text with the checkpoint in the folder, or with the one that is embedded in the
# package. While none is embedded, it says so and times decoding on random weights. Flags
# are those of scripts/generate.py, or of scripts/bench_decode.py in the latter case. A
# relative folder is relative to where it is called from.
set -euo pipefail
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=scripts/venv.sh
. "$root/scripts/venv.sh"

script=generate.py
checkpoint=$root/metrale_jax/assets/demo
if [[ $# -gt 0 && $1 != -* ]]; then
  checkpoint=$1
  shift
  if [[ ! -f $checkpoint/config.json ]]; then
    echo "No checkpoint in $checkpoint (it has no config.json);" \
      "name the folder of one: bash scripts/demo.sh FOLDER" >&2
    exit 2
  fi
elif [[ ! -f $checkpoint/config.json ]]; then
  echo "No trained checkpoint is embedded yet: timing plain decoding on random weights." \
    "For text: bash scripts/demo.sh FOLDER" >&2
  script=bench_decode.py
fi

flags=("$@")
if [[ $script == generate.py ]]; then
  flags=(--checkpoint "$checkpoint" "$@")
  if [[ " ${flags[*]}" != *" --prompt"* ]]; then
    flags+=(--prompt "def fibonacci(n):")
  fi
fi

extras=()
if command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
  extras+=(cuda12)
fi
python=$(supported_python)
# An empty array counts as unset in the bash of macOS.
(cd -- "$root" && prepare_venv .venv "$python" ${extras[@]+"${extras[@]}"})
exec "$root/.venv/bin/python" "$root/scripts/$script" ${flags[@]+"${flags[@]}"}
