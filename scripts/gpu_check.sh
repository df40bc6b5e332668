#!/usr/bin/env bash
# Two training steps of two agents on one GPU, measured beside `umad plan`: tokens/s, MFU, peak memory per phase.
#   scripts/gpu_check.sh                        on a GPU, a few minutes; --help for options
#   scripts/gpu_check.sh --device cpu --tiny    the same on small shapes, in seconds
# Nothing has to be installed: the checkout is used as it lies here, with the Python in .venv or $PYTHON or python3. Packages
# that are missing are installed if an index can be reached, else named. Results go to $OUT/gpu_check.json, if OUT is set.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-}
if [ -z "$python" ]; then
  python=python3
  if .venv/bin/python -c 'import torch' 2>/dev/null; then python=.venv/bin/python; fi
fi
export PYTHONPATH="$PWD:$PWD/scripts${PYTHONPATH:+:$PYTHONPATH}"
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
missing=$("$python" scripts/gpu_check.py --missing)
if [ -n "$missing" ]; then
  echo "not installed here: $missing; trying pip"
  # a virtual environment of its own over what is there: the machine's Python stays as it is
  "$python" -m venv --system-site-packages build/gpu_check_venv || true
  if [ -x build/gpu_check_venv/bin/python ]; then python=build/gpu_check_venv/bin/python; fi
  # shellcheck disable=SC2086 # one word a package
  "$python" -m pip install -q --retries 1 --timeout 15 $missing || true
  missing=$("$python" scripts/gpu_check.py --missing)
  if [ -n "$missing" ]; then
    echo "gpu_check: these packages are missing and could not be installed: $missing" >&2
    exit 2
  fi
fi
exec "$python" scripts/gpu_check.py "$@"
