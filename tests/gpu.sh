#!/usr/bin/env bash
# Run the GPU tests, the benches, a whole run with its audit and the step benchmark on a machine with neither uv nor an index.
#
#     tests/gpu.sh          on a machine with a GPU
#     tests/gpu.sh --dry    the same commands on a CPU, with the smallest sizes; DEVICE=cpu implies it
#
# Besides torch and pytest this needs numpy and hypothesis; the suite needs matplotlib, rich, safetensors, scipy and typer.
# With pytest-xdist, WORKERS=12 runs the tests in 12 processes: most of their time is compilation.
# Results are written to $OUT (default: docs/results/DATE-gpu, or a temporary folder with --dry), in the form from which
# docs/measure.py --write-only makes the tables of the READMEs. Each command may take $LIMIT seconds (1800), so that one that hangs
# does not end the others. The exit status is 1 if any command failed.
set -uo pipefail
cd "$(dirname "$0")/.."
DRY=""
if [ "${1:-}" = --dry ] || { [ $# -eq 0 ] && [ "${DEVICE:-cuda}" = cpu ]; }; then
    DRY=1
elif [ $# -gt 0 ]; then
    echo "expected no argument or --dry, got $1" >&2
    exit 2
fi
PYTHON="${PYTHON:-python3}"
LIMIT="${LIMIT:-1800}"
if [ -n "$DRY" ]; then
    DEVICE="${DEVICE:-cpu}"
    QUICK="${QUICK:-1}"
    OUT="${OUT:-$(mktemp -d)}"
else
    DEVICE="${DEVICE:-cuda}"
    OUT="${OUT:-docs/results/$(date +%F)-gpu}"
fi
BENCHES="${BENCHES:-flashattn2 zero ddp collectives tinyml}"
mkdir -p "$OUT"
for package in packages/*/; do
    PYTHONPATH="$PWD/${package}src${PYTHONPATH:+:$PYTHONPATH}"
done
export PYTHONPATH="$PWD/tests:$PYTHONPATH"

"$PYTHON" - "$DEVICE" <<'CHECK' || exit 2
import importlib.util, sys
missing = [m for m in ("torch", "pytest", "numpy", "hypothesis") if not importlib.util.find_spec(m)]
if missing:
    sys.exit("tests/gpu.sh needs " + ", ".join(missing) + ", which this python does not have")
import torch
if sys.argv[1] == "cuda" and not torch.cuda.is_available():
    sys.exit("tests/gpu.sh needs a CUDA device and this machine shows none; use --dry")
print(torch.cuda.get_device_name() if sys.argv[1] == "cuda" else sys.argv[1], "torch", torch.__version__)
CHECK

failed=""

# attempt NAME COMMAND...: run a command within the limit, and remember its name if it fails.
attempt() {
    local name="$1"
    shift
    echo "== $name"
    if ! timeout "$LIMIT" "$@"; then
        failed="$failed $name"
        return 1
    fi
}

# bench NAME: run the bench of a package, and store its rows with the facts about the machine.
bench() {
    local name="$1" rows command
    rows="$(mktemp)"
    command="-m $name.bench --device $DEVICE${QUICK:+ --quick}"
    # shellcheck disable=SC2086
    if attempt "$name.bench" "$PYTHON" $command --json "$rows"; then
        "$PYTHON" - "$rows" "$OUT/$name-gpu.json" "python $command" <<'STORE' || failed="$failed $name-gpu.json"
import json, sys
from pathlib import Path
from llmsys_suite.environment import environment

rows, path = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
path.write_text(json.dumps({"environment": environment(), "command": sys.argv[3], "rows": rows}, indent=1) + "\n")
STORE
    fi
    rm -f "$rows"
}

# Without a GPU every test that is marked gpu skips; the dry run shows that all of them can be imported and collected. Other files are
# not collected: they need more packages than this machine may have.
mapfile -t files < <(grep -rl --include='test_*.py' 'pytest\.mark\.gpu' packages tests)
attempt "tests marked gpu" "$PYTHON" -m pytest -q -rfE -m gpu ${DRY:+--collect-only} ${WORKERS:+-p no:benchmark -n "$WORKERS"} \
    "${files[@]}"
for name in $BENCHES; do
    bench "$name"
done
missing="$("$PYTHON" -c 'import importlib.util as u
print(*(m for m in ("matplotlib", "rich", "safetensors", "scipy", "typer") if not u.find_spec(m)))')"
if [ -n "$missing" ]; then
    echo "== the whole run is left out: this python does not have $missing"
    left_out=", without the whole run"
elif [ -n "$DRY" ]; then
    attempt "whole run" "$PYTHON" -m llmsys_suite run --preset cpu --size mini --steps 2 --warmup 1 --learn 8 --out "$OUT/run"
    attempt "steps by size" "$PYTHON" -m llmsys_suite step --sizes mini --contexts 16 --dtype fp32,bf16 --device cpu --out "$OUT/steps"
else
    attempt "whole run" "$PYTHON" -m llmsys_suite run --preset gpu --out "$OUT/run"
    for dtype in fp32 tf32; do
        attempt "a short run in $dtype" "$PYTHON" -m llmsys_suite run train audit --preset gpu --dtype $dtype --steps 4 \
            --warmup 1 --out "$OUT/$dtype"
    done
    attempt "steps by size" "$PYTHON" -m llmsys_suite step --sizes small,medium,large,xl,2.7B --contexts 128,512 --dtype fp32,bf16 \
        --compile --device cuda --out "$OUT/steps"
fi
if [ -n "$failed" ]; then
    echo "failed:$failed" >&2
    exit 1
fi
echo "all commands succeeded${left_out:-}; results are in $OUT"
