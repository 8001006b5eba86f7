#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, in one call of less than ten minutes: checks, training steps at published shapes,
# decoding, captures, strategies. One table at the end, and summary.json in $OUT where that is set. Options go to
# tests/gpu/run.py (--only STAGE..., --minutes 5); `--device cpu --tiny` tries the script without a GPU.
#   PYTHON=python3   the interpreter, with a CUDA build of torch
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1}

case " $* " in
  *" --device cpu "*) ;;
  *) "$python" -c 'import torch; assert torch.cuda.is_available()' 2> /dev/null \
    || { echo "tests/gpu/run.sh: $python has no torch that sees a CUDA device (PYTHON=... chooses another;" \
      "--device cpu --tiny tries the script without one)"; exit 1; } ;;
esac

# What is not there yet, by the names that pip knows; torch itself stays the one that sees the GPU.
mapfile -t missing < <("$python" - << 'END'
from importlib.metadata import PackageNotFoundError, version
import re, tomllib
for line in tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"]:
    name = re.match(r"[\w.-]+", line)[0]
    try:
        version(name)
    except PackageNotFoundError:
        print(name)
END
)
if ((${#missing[@]})); then
  echo "missing, and installed now: ${missing[*]}"
  "$python" -m pip install --quiet --disable-pip-version-check -c <(grep -v '^torch==' constraints.txt) "${missing[@]}" \
    || echo "pip could not install them; stages that need them will say so"
fi
exec "$python" -m tests.gpu.run "$@"
