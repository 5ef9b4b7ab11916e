#!/usr/bin/env bash
# Runs the tests, in a virtual environment that it makes on the first call.
#
#   bash scripts/test.sh [PYTEST ARGUMENT...]      such as: -k fold tests/core
#
# Paths among the arguments are relative to the repository's root. On Linux the public
# index serves torch, an oracle of the tests, as a CUDA build of several GB; it works as
# well as a CPU build, and a CPU wheel of the pinned version, if pip is configured to find
# one, is taken instead.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/venv.sh
. scripts/venv.sh

python=$(supported_python)
prepare_venv .venv "$python" test train
exec .venv/bin/python -m pytest "$@"
