# shellcheck shell=bash
# Sourced by test.sh, demo.sh and .ci/run: makes and keeps the virtual environments.
#
# An environment counts as complete when its python runs and it holds, for each extra that
# the caller wants, a copy of the pyproject.toml that the extra was installed from. What
# was never completed, or was completed in another place, is made anew; what is merely
# out of date is installed again.

# Prints the first python on the PATH that suits the project, Python 3.11 if possible.
supported_python() {
  find_python 3.11 python3.11 python3 python3.12 python3.13 python3.14 && return
  echo "No usable Python was found. Install Python 3.11 or newer with its venv module" \
    "(on Debian and Ubuntu: apt install python3 python3-venv)." >&2
  return 1
}

# Prints the first of the named pythons that runs, is at least MINIMUM and can make
# virtual environments; fails when there is none.
#   find_python MINIMUM NAME...
find_python() {
  local minimum=$1 name
  shift
  for name in "$@"; do
    # The real path, because the python of an active environment may be about to go.
    "$name" - "$minimum" 2>/dev/null <<'PYTHON' && return
import ensurepip
import os
import sys
import venv

if sys.version_info[:2] < tuple(int(part) for part in sys.argv[1].split(".")):
    sys.exit(1)
print(os.path.realpath(sys.executable))
PYTHON
  done
  return 1
}

# Installs the project (editable) and its EXTRAs into the virtual environment FOLDER, in
# the current directory, the repository's root; returns at once where that is done.
#   prepare_venv FOLDER PYTHON [EXTRA...]
prepare_venv() {
  local folder=$1 python=$2
  shift 2
  _is_complete "$folder" "$@" && return
  if command -v flock >/dev/null; then
    # Two scripts that start together must not install into one folder at once.
    (flock 9 && _install "$folder" "$python" "$@") 9>"$folder.lock"
  else
    _install "$folder" "$python" "$@"
  fi
}

_install() {
  local folder=$1 python=$2 extra extras
  shift 2
  # Whoever held the lock may have done the work.
  _is_complete "$folder" "$@" && return
  if ! _was_completed_here "$folder"; then
    echo "Making $folder with $python" >&2
    rm -rf -- "$folder"
    "$python" -m venv "$folder" >&2 || return
  fi
  extras=$(IFS=, && echo "$*")
  echo "Installing into $folder${extras:+ the extras $extras}; this takes minutes" >&2
  for extra in base "$@"; do
    rm -f -- "$folder/installed/$extra"
  done
  "$folder/bin/python" -m pip install --quiet --disable-pip-version-check \
    --editable ".${extras:+[$extras]}" >&2 || return
  mkdir -p -- "$folder/installed"
  for extra in base "$@"; do
    cp pyproject.toml "$folder/installed/$extra" || return
  done
  pwd -P >"$folder/installed/place"
}

_is_complete() {
  local folder=$1 extra
  shift
  _was_completed_here "$folder" || return
  for extra in base "$@"; do
    cmp -s pyproject.toml "$folder/installed/$extra" || return
  done
}

_was_completed_here() {
  local folder=$1
  [[ -f $folder/installed/place && $(<"$folder/installed/place") == "$(pwd -P)" ]] &&
    "$folder/bin/python" -c "import pip" 2>/dev/null
}
