#!/bin/sh
# Check and measure vitascope on a GPU, in parts with a time limit each, ten minutes together. A part that is
# named alone may take ten minutes. Paths are relative to the root of the repository.
#
#     sh benchmarks/on_gpu.sh [--dry] [--wheels FOLDER] [--data DATA] [--seed SEED] [PART ...]
#
# ceilings, agreement, waits, sharded, compilation: see benchmarks/gpu_parts.py
# throughput: training steps beside timm's, see benchmarks/gpu_training.py
# minute:     CIFAR-10 in two minutes, see benchmarks/same_minutes.py
# accuracy:   the best of ten minutes; only if it is named; a SEED from 1 on adds to the numbers of those before
#
# Logs, tables as Markdown and JSON, and a table of the profiler go to $OUT, by default benchmarks/results. A
# part that fails or reaches its limit does not stop the others: the last line names it, and the exit status is
# 1. DATA is CIFAR-10 as `vitascope train` takes it; without a network, an archive of its images as files.
# FOLDER has wheels of what this machine lacks of tyro, captum, timm and what they need. --dry takes tiny sizes
# on a CPU, to test the script, by default into a new folder.
set -u
export VITASCOPE_FEATURES_GB=0 # features of one device must not be read by the other
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
data=cifar10 dry= seed=0 wheels=

while [ $# -gt 0 ]; do
    case $1 in
    --dry) dry=--dry ;;
    --wheels | --data | --seed)
        [ $# -gt 1 ] || { echo "$1 needs a value" >&2; exit 2; }
        case $1 in --wheels) wheels=$2 ;; --data) data=$2 ;; --seed) seed=$2 ;; esac
        shift
        ;;
    -*) echo "no option $1: see the head of $0" >&2; exit 2 ;;
    *) break ;;
    esac
    shift
done
[ $# -gt 0 ] || set -- ceilings agreement waits sharded compilation throughput minute

case $seed in '' | *[!0-9]*) echo "--seed is a number, not '$seed'" >&2; exit 2 ;; esac

parts=$#
seconds() { # the limit of a part
    case $1 in
    ceilings) limit=25 ;;
    agreement) limit=65 ;;
    waits) limit=40 ;;
    sharded) limit=30 ;;
    compilation) limit=75 ;;
    throughput) limit=215 ;;
    minute) limit=150 ;;
    accuracy) limit=600 ;;
    *) echo "no part $1: see the head of $0" >&2; return 1 ;;
    esac
    [ "$parts" -gt 1 ] && [ -z "$dry" ] || limit=600
    echo "$limit"
}
for part in "$@"; do seconds "$part" >/dev/null || exit 2; done

part() { # run one, within its limit
    within="timeout -k 5 $(seconds "$1") python3"
    case $1$dry in
    throughput) $within benchmarks/gpu_training.py --rounds 3 --warmup 2 --steps 10 --out ;;
    throughput--dry)
        $within benchmarks/gpu_training.py --device cpu --precision fp32 --tiny --rounds 1 \
            --warmup 1 --steps 1 --matmul 64 --backend eager --out
        ;;
    minute) # the first 94% by a ViT
        $within benchmarks/same_minutes.py --data "$data" --minutes 2 --goal 0.94 --seeds 1 --only vitascope --out \
            embed_dim=192 depth=4 num_heads=3 'model_options={"tokenizer_widths": [64, 128]}' \
            batch_size=512 lr=0.006 compile=on
        ;;
    accuracy)
        again=$([ "$seed" -eq 0 ] || echo --resume)
        $within benchmarks/same_minutes.py --data "$data" --minutes 8.5 --goal 0.96 --seeds $((seed + 1)) \
            --only vitascope --out $again \
            embed_dim=256 depth=6 patch_size=2 'model_options={"tokenizer_widths": [64]}' \
            batch_size=512 lr=0.004 randaugment=2 erase=0.25 cutmix=1.0 mixup=0.2 compile=on
        ;;
    minute--dry | accuracy--dry)
        $within benchmarks/same_minutes.py --data digits --minutes 0.08 --seeds 1 --only vitascope --out \
            device=cpu embed_dim=16 depth=1 num_heads=1
        ;;
    *--dry) $within benchmarks/gpu_parts.py "$1" --device cpu --dry --out ;;
    *) $within benchmarks/gpu_parts.py "$1" --out ;;
    esac
}

[ -n "${OUT:-}" ] || OUT=$([ -z "$dry" ] && echo benchmarks/results || mktemp -d)
export OUT
mkdir -p "$OUT" || exit 2
echo "results: $OUT"
if [ -n "$wheels" ]; then
    for package in tyro captum timm; do
        python3 -c "import $package" 2>/dev/null ||
            python3 -m pip install --quiet --no-index --find-links "$wheels" "$package" || exit 1
    done
fi
failed=
for name in "$@"; do
    echo "== $name, at most $(seconds "$name") s"
    part "$name" >"$OUT/$name.log" 2>&1
    status=$?
    cat "$OUT/$name.log"
    case $status in
    0) ;;
    124 | 137) failed="$failed $name (time limit)" ;;
    *) failed="$failed $name" ;;
    esac
done
[ -z "$failed" ] || { echo "failed:$failed"; exit 1; }
echo "all parts passed: $*"
