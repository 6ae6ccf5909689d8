#!/usr/bin/env bash
# Runs all of tierfs that needs a GPU, in 8 minutes at most: the tests of tests/device on the GPU, then
# integration/bench/device.py.
#
#     integration/device/run.sh [ARGUMENTS OF device.py]
#
# Run it from the repository's root, on a machine with Python 3.12, torch 2.11+cu130, CuPy 14, pytest, pytest-timeout
# and hypothesis. Results go to $OUT (/tmp/tierfs-device): device.json, device.json.small and device.json.big (the rows
# so far), bench.log, bench.err, tests.log, tests.xml. The short table comes last. The status is that of the tests: if
# some fail, the bench runs all the same. Without a GPU, the script says so and ends with 0.
#
#     OUT                directory for results
#     PYTHON             the interpreter (python3)
#     WHOLE_S            seconds for everything but activations (460)
#     TESTS_S            seconds for the tests at most (90)
#     ACTIVATIONS_S      seconds for integration/bench/activations.py, after all else (0: it does not run)
#     TIERFS_BENCH_DIR   directory for stores and stock's files ($TMPDIR or /tmp, or shared memory if the disk is slow)
#     TIERFS_DEVICE_MOUNT=1   enlarge /dev/shm to 80 % of memory (needs root, and a machine without other users)
#
# The machine's missing dependencies of tierfs travel as wheels in .whl/ (6.2 MB). Make them with:
#
#     echo /.whl/ >> .git/info/exclude
#     python3 -m pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
#         --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
#         --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d .whl zstandard==0.25.0 fsspec==2026.9.0 xxhash==4.1.0
#
# zstandard is missing there. fsspec and xxhash are present, but their versions may be too old. The compiled loops,
# tierfs/_kernels.abi3.so, travel too: git ignores them. Where they are missing, the script compiles them with cc.
# Without them, the figures of copies and digests on the host are those of NumPy.
set -u
begun=$SECONDS
OUT=${OUT:-/tmp/tierfs-device}
PYTHON=${PYTHON:-python3}
TESTS_S=${TESTS_S:-90}
WHOLE_S=${WHOLE_S:-460}
mkdir -p "$OUT"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=
cd "$(dirname "$0")/../.." || exit 1

why=$("$PYTHON" - 2>&1 <<'PY'
import sys
try:
    import torch
except ImportError as error:
    sys.exit(f"torch does not import: {error}")
sys.exit(None if torch.cuda.is_available() else "torch sees no CUDA device")
PY
)
if [ $? -ne 0 ]; then
    dry=
    for argument in "$@"; do [ "$argument" = --dry ] && dry=1; done
    if [ -z "$dry" ]; then
        echo "skipped: ${why##*$'\n'}"
        exit 0
    fi
fi

if compgen -G '.whl/*.whl' >/dev/null; then
    site=${TMPDIR:-/tmp}/tierfs-site
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" .whl/*.whl || exit
    export PYTHONPATH=$site:$PWD
else
    export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
fi

loops() { "$PYTHON" -c 'from tierfs import kernels; print("loops in C:", kernels.status()); raise SystemExit(not kernels.active)'; }
if ! loops; then
    include=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    cc -O3 -std=c11 -fPIC -shared -I"$include" tierfs/_kernels.c -o tierfs/_kernels.abi3.so && loops
fi

command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,driver_version,memory.total,pcie.link.gen.max --format=csv,noheader
if [ "${TIERFS_DEVICE_MOUNT:-}" = 1 ]; then
    mount -o remount,size=80% /dev/shm && echo "/dev/shm was enlarged"
fi
df -h /dev/shm "${TMPDIR:-/tmp}" | cat
grep -E 'MemTotal|MemAvailable' /proc/meminfo
echo "locked memory: $(ulimit -l)"
"$PYTHON" - <<'PY'
import importlib
from importlib.metadata import packages_distributions, version

packages = packages_distributions()
for name in ("torch", "cupy", "numpy", "fsspec", "xxhash", "zstandard", "rich", "pytest", "pytest_timeout", "hypothesis"):
    try:
        module = importlib.import_module(name)
        print(name, [version(one) for one in packages.get(name, [])], module.__file__)
    except Exception as error:
        print(name, repr(error))
PY

# -c /dev/null: pyproject.toml turns all warnings into errors, even those of packages that are older or newer here.
echo "== tests"
# pytest-timeout 2.3 lets pytest end itself between two tests, and so name those that failed. An interrupt
# does not: torch catches it as the error of a rank.
session=(--session-timeout "$TESTS_S")
"$PYTHON" -m pytest -c /dev/null --help | grep -q -- --session-timeout || session=()
timeout -k 5 $((TESTS_S + 30)) "$PYTHON" -m pytest -q -rf --tb=short --maxfail=20 -p no:cacheprovider -c /dev/null \
    --rootdir "$PWD" -W ignore --timeout 30 "${session[@]}" --durations 5 --junitxml "$OUT/tests.xml" -m cuda tests/device \
    >"$OUT/tests.log" 2>&1
status=$?
tail -n 60 "$OUT/tests.log"
[ $status -eq 5 ] && echo "no test of tests/device is for a GPU"
tests_took=$((SECONDS - begun))

echo "== bench, $tests_took s after the start"
directory=${TIERFS_BENCH_DIR:-}
if [ -z "$directory" ]; then
    directory=${TMPDIR:-/tmp}
    file=$(mktemp -p "$directory")
    speed=$("$PYTHON" - "$file" <<'PY'
import os, sys, time

piece, begin = os.urandom(16 << 20), time.perf_counter()
with open(sys.argv[1], "wb", buffering=0) as file:
    for _ in range(48):
        file.write(piece)
    os.fsync(file.fileno())
print(int(48 * len(piece) / (time.perf_counter() - begin) / 1e6))
PY
)
    rm -f "$file"
    free=$(df --output=avail -B1 /dev/shm | tail -n 1)
    # The bench writes sixteen states. Below 2 GB/s it would mostly wait for the disk. 4.6 states exist at once.
    if [ "${speed:-0}" -lt 2000 ] && [ "$free" -gt 92000000000 ]; then directory=/dev/shm; fi
    echo "one thread writes $speed MB/s to ${TMPDIR:-/tmp}; files go to $directory"
fi
left=$((WHOLE_S - 12 - SECONDS + begun))
timeout -k 5 $((left + 12)) "$PYTHON" integration/bench/device.py --budget "$left" --directory "$directory" \
    --json "$OUT/device.json" "$@" 2>"$OUT/bench.err" | tee "$OUT/bench.log"
bench=${PIPESTATUS[0]}
[ "$bench" -ne 0 ] && { echo "the bench ended with $bench"; tail -n 15 "$OUT/bench.err"; }

if [ "${ACTIVATIONS_S:-0}" -gt 0 ]; then
    echo "== activations"
    timeout -k 5 "$ACTIVATIONS_S" "$PYTHON" integration/bench/activations.py --device cuda --layers 8 --width 2048 \
        --length 1024 --min-bytes 4MiB --ram 2GiB --nvme 16GiB --whole-ram 16GiB | tee "$OUT/activations.log"
fi

echo "tests: $(tail -n 1 "$OUT/tests.log") (status $status); all took $((SECONDS - begun)) s"
[ $status -eq 5 ] && status=0
exit $status
