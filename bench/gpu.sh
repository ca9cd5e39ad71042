#!/usr/bin/env bash
# Tries and measures on one GPU what the project does there, within twelve minutes.
#
#     bench/gpu.sh wheels FOLDER [PYTHON_VERSION]    download what the machine with the GPU lacks
#     bench/gpu.sh run RESULTS [WHEELS]              on that machine, in the root of the project
#
# For a machine that has a Python with PyTorch, pytest and scikit-learn, and no network: `wheels` puts the other
# packages into FOLDER, at the versions of requirements.lock (for PYTHON_VERSION, default 3.12, on x86-64; about 20 MB),
# and needs `make setup`. `run` installs them into a temporary folder, without changing the machine.
#
# `run` writes a file for each part into RESULTS as the part goes on, and the results into RESULTS/summary.txt. Parts,
# in the order of their value; one that takes longer than its limit is ended:
#
#     tests       the tests of `make test-gpu`, but for those of programs under bench/, which `run` measures itself
#     overhead    a step of AdaScale against plain DDP, on one rank, with statistics sampled and in every step
#     rescale     two replicas on this GPU: changes of size, and a kill, with 1 GB of state
#     elastic     a step of the elastic trainer against the trainer alone and plain DDP, on one replica
#     counts      kernels, copies and waits of a step of AdaScale and of plain DDP
#     checkpoint  the stall of a checkpoint of 1 GB, in memory
#     ramp        a piece of the batch ramp of a GPT of 124M parameters (`bench/ramp.py train` continues it)
#
# Variables: PYTHON (default python3); PARTS, a list of the parts to run; DEVICE=cpu tries the script without a GPU,
# with small sizes.
set -euo pipefail
cd "$(dirname "$0")/.."

# Packages that are not with PyTorch, pytest and scikit-learn. The names are those of requirements.lock.
packages=(
    aiohappyeyeballs aiohttp aiohttp-retry aiosignal annotated-doc annotated-types anyio attrs certifi charset-normalizer click
    durationpy fairscale fastapi frozenlist h11 httptools hypothesis idna iso8601 jsonpatch jsonpointer kopf kubernetes markdown-it-py mdurl
    multidict oauthlib opentelemetry-api prometheus-client propcache psycopg psycopg-binary pydantic pydantic-core pygments python-dateutil
    python-json-logger pytest pluggy iniconfig pytest-timeout pytest-xdist execnet pyyaml requests requests-oauthlib rich
    safetensors shellingham six sortedcontainers starlette typer typing-extensions typing-inspection urllib3 uvicorn
    uvloop websocket-client yarl
)

wheels() {
    local folder=$1 version=${2:-3.12} platforms=() package pinned=()
    mkdir -p "$folder"
    for number in 17 24 26 27 28 31 34; do platforms+=(--platform "manylinux_2_${number}_x86_64"); done
    platforms+=(--platform manylinux2014_x86_64 --platform manylinux1_x86_64)
    for package in "${packages[@]}"; do
        pinned+=("$(grep -m 1 -oE "^$package==[^ ]+" requirements.lock || { echo "requirements.lock lacks $package" >&2; exit 2; })")
    done
    # FairScale has no wheel.
    .venv/bin/uv pip install --quiet pip setuptools wheel
    .venv/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir "$folder" "$(grep -oE '^fairscale==[^ ]+' requirements.lock)"
    printf '%s\n' "${pinned[@]}" | grep -v '^fairscale==' > "$folder/requirements.txt"
    .venv/bin/python -m pip download --quiet --no-deps --only-binary=:all: --python-version "$version" --implementation cp \
        "${platforms[@]}" --dest "$folder" --requirement "$folder/requirements.txt"
    # Its metadata are used; the modules are those of the project's folder.
    .venv/bin/uv build --quiet --wheel --out-dir "$folder"
    du -sh "$folder"
}

python=${PYTHON:-python3}
device=${DEVICE:-cuda}
slowness=1
if [ "$device" = cpu ]; then slowness=5; fi

# $(part NAME SECONDS COMMAND...): run a part, and write its result into the summary.
part() {
    local name=$1 limit=$(($2 * slowness)) code=0 began=$SECONDS
    shift 2
    case " ${PARTS:-$name} " in *" $name "*) ;; *) return 0 ;; esac
    timeout --kill-after=5 "$limit" "$@" > "$results/$name.txt" 2>&1 || code=$?
    {
        echo "== $name: exit code $code after $((SECONDS - began)) s (limit $limit s)"
        case $name in tests) grep -E '^(FAILED|ERROR)|passed|failed|^[0-9.]+s ' "$results/$name.txt" | tail -60 || true ;; *) tail -70 "$results/$name.txt" ;; esac
    } | tee -a "$results/summary.txt"
}

networks=(resnet18 transformer) sizes=(--blocks 4)
if [ "$device" = cpu ]; then networks=(deep) sizes=(--blocks 2 --steps 1); fi

# step NETWORK... OPTION...: `bench/overhead.py` with each optimizer.
step() {
    local optimizer
    for optimizer in sgd adamw; do
        echo "$optimizer"
        "$python" bench/overhead.py "$@" --device "$device" --ranks 1 --optimizer "$optimizer"
    done
}

rescale() {
    "$python" bench/rescale.py --device "$device" --state "$state" --counts 1,2,1 --kill 0 --rounds 1 --steps 20
}

run() {
    results=$(mkdir -p "$1" && cd "$1" && pwd)
    : > "$results/summary.txt"
    export state=1GB
    local gigabytes=1 elastic=resnet18 ramp=124M
    if [ "$device" = cpu ]; then state=tiny gigabytes=0.01 elastic=tiny ramp=tiny; fi
    site=$(mktemp -d)  # not local: the trap runs after this function
    trap 'rm -rf "$site"' EXIT
    if [ -n "${2:-}" ]; then
        "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check --target "$site" "$2"/*.whl
    fi
    export PYTHONPATH="$PWD/core:$PWD/client:$PWD/worker:$PWD/api:$PWD/controller:$PWD/tests:$site" PYTHONUNBUFFERED=1
    export OMP_NUM_THREADS=1 python device
    export -f step rescale
    {
        "$python" -c 'import sys, torch; print("Python", sys.version.split()[0] + ", torch", torch.__version__)'
        if [ "$device" = cuda ]; then nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader; fi
        git log -1 --format='commit %h' 2>/dev/null || true
    } | tee -a "$results/summary.txt"

    local marker=gpu tests
    if [ "$device" = cpu ]; then marker="not slow and not cluster"; fi
    mapfile -t tests < <(grep -rl --include='test_*.py' --exclude=test_benchmarks.py 'mark\.gpu' tests/worker)
    part tests 90 "$python" -m pytest -m "$marker" --numprocesses 8 --dist worksteal --timeout 80 --durations 12 \
        -p no:cacheprovider -p no:benchmark "${tests[@]}"
    part overhead 170 bash -ec "step ${networks[*]} ${sizes[*]} --contenders plain 'plain again' adascale 'every step'"
    part rescale 80 bash -ec "rescale && rescale"
    part elastic 55 "$python" bench/elastic_overhead.py "$elastic" --replicas 1 --device "$device" --blocks 8
    part counts 45 bash -ec "step ${networks[0]} --profile --contenders plain adascale"
    part checkpoint 25 "$python" bench/checkpoint.py --device "$device" --gigabytes "$gigabytes" --rounds 3 --folder /dev/shm
    part ramp 180 "$python" bench/ramp.py train --size "$ramp" --device "$device" --minutes 2 --out "$results" --states "$results/states"
}

case "${1:-}" in
    wheels | run) [ $# -ge 2 ] || { sed -n '3,4s/^# //p' "$0" >&2; exit 2; }; "$@" ;;
    *) sed -n '3,5s/^# *//p' "$0" >&2; exit 2 ;;
esac
