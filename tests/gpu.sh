#!/usr/bin/env bash
# The GPU tests and benches on a machine that has python, pytest and torch, and neither uv nor an index.
# Results go to $OUT (default: docs/results/DATE-gpu). Each bench is limited, so that one that hangs
# does not take the others with it.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"
OUT="${OUT:-docs/results/$(date +%F)-gpu}"
mkdir -p "$OUT"
for package in packages/*/; do
    PYTHONPATH="$PWD/${package}src${PYTHONPATH:+:$PYTHONPATH}"
done
export PYTHONPATH="$PWD/tests:$PYTHONPATH"

"$PYTHON" - <<'CHECK' || exit 2
import sys, torch
if not torch.cuda.is_available():
    sys.exit("make test-gpu needs a CUDA device and this machine shows none")
print(torch.cuda.get_device_name(), "torch", torch.__version__)
CHECK

status=0
timeout 900 "$PYTHON" -m pytest -q -m gpu packages tests || status=1
for name in flashattn2 zero ddp collectives; do
    echo "== $name.bench"
    timeout 600 "$PYTHON" -m "$name.bench" --device cuda --json "$OUT/$name.json" ${QUICK:+--quick} || status=1
done
timeout 600 "$PYTHON" -m llmsys_suite run --preset gpu --out "$OUT/run" || status=1
exit $status
