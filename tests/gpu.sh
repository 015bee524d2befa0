#!/usr/bin/env bash
# The GPU tests and benches on a machine with neither uv nor an index. Besides torch and pytest they need numpy and
# hypothesis; the whole run at the end needs matplotlib, rich, safetensors, scipy and typer too. What is missing is said first.
# Results go to $OUT (default: docs/results/DATE-gpu), in the form that docs/measure.py --write-only makes
# the READMEs' tables from. Each bench is limited to $LIMIT seconds (1800), so that one that hangs does not take
# the others with it.
# DEVICE=cpu BENCHES=flashattn2 QUICK=1 OUT=/tmp/dry tests/gpu.sh is a dry run on a machine with no GPU.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"
DEVICE="${DEVICE:-cuda}"
OUT="${OUT:-docs/results/$(date +%F)-gpu}"
mkdir -p "$OUT"
for package in packages/*/; do
    PYTHONPATH="$PWD/${package}src${PYTHONPATH:+:$PYTHONPATH}"
done
export PYTHONPATH="$PWD/tests:$PYTHONPATH"

"$PYTHON" - "$DEVICE" <<'CHECK' || exit 2
import importlib.util, sys
missing = [m for m in ("torch", "pytest", "numpy", "hypothesis") if not importlib.util.find_spec(m)]
if missing:
    sys.exit("make test-gpu needs " + ", ".join(missing) + " besides what this python has")
import torch
if sys.argv[1] == "cuda" and not torch.cuda.is_available():
    sys.exit("make test-gpu needs a CUDA device and this machine shows none")
print(torch.cuda.get_device_name() if sys.argv[1] == "cuda" else sys.argv[1], "torch", torch.__version__)
CHECK

# keep NAME COMMAND...: run a bench, and keep its rows beside the machine they were measured on.
keep() {
    local name="$1" rows
    shift
    rows="$(mktemp)"
    if ! timeout "${LIMIT:-1800}" "$PYTHON" "$@" --json "$rows"; then
        rm -f "$rows"
        return 1
    fi
    "$PYTHON" - "$rows" "$OUT/$name.json" "python $*" <<'KEEP'
import json, sys
from pathlib import Path
from llmsys_suite.environment import environment

rows, path = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
path.write_text(json.dumps({"environment": environment(), "command": sys.argv[3], "rows": rows}, indent=1) + "\n")
if path.stem == "flashattn2":
    from flashattn2 import record

    try:
        print(*record.plot(rows, path.parent), sep="\n")
    except ModuleNotFoundError as error:
        print("no plots:", error)
KEEP
    local kept=$?
    rm -f "$rows"
    return $kept
}

status=0
timeout 900 "$PYTHON" -m pytest -q -m gpu packages tests || status=1
for name in ${BENCHES:-flashattn2 zero ddp collectives}; do
    echo "== $name.bench"
    keep "$name" -m "$name.bench" --device "$DEVICE" ${QUICK:+--quick} || status=1
done
missing="$("$PYTHON" -c 'import importlib.util as u
print(*(m for m in ("matplotlib", "rich", "safetensors", "scipy", "typer") if not u.find_spec(m)))')"
if [ -n "$missing" ]; then
    echo "== the whole run is left out: this python lacks $missing"
elif [ "$DEVICE" = cuda ]; then
    timeout 600 "$PYTHON" -m llmsys_suite run --preset gpu --out "$OUT/run" || status=1
fi
exit $status
