#!/bin/sh
# Check and measure vitascope on a GPU, in parts with a time limit each.
#
#     sh benchmarks/on_gpu.sh [--dry] [--wheels FOLDER] [--data DATA] [PART ...]
#
# agreement, waits: see benchmarks/gpu_parts.py
# throughput: training steps beside timm's, see benchmarks/gpu_training.py
# minute:     CIFAR-10 in two minutes by `vitascope train`
#
# Logs and tables as Markdown and JSON go to $OUT, by default benchmarks/results. A part that fails or reaches
# its limit does not stop the others: the last line names it, and the exit status is 1. DATA is CIFAR-10 as
# `vitascope train` takes it; without a network, an archive of its images as files. FOLDER has wheels of what
# this machine lacks of tyro, timm and what they need. --dry takes tiny sizes on a CPU, to test the
# script, by default into a new folder.
set -u
export VITASCOPE_FEATURES_GB=0 # features of one device must not be read by the other
cd "$(dirname "$0")/.." || exit 2
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
data=cifar10 dry= wheels=

while [ $# -gt 0 ]; do
    case $1 in
    --dry) dry=--dry ;;
    --wheels | --data)
        [ $# -gt 1 ] || { echo "$1 needs a value" >&2; exit 2; }
        case $1 in --wheels) wheels=$2 ;; --data) data=$2 ;; esac
        shift
        ;;
    -*) echo "no option $1: see the head of $0" >&2; exit 2 ;;
    *) break ;;
    esac
    shift
done
[ $# -gt 0 ] || set -- agreement waits throughput minute
for part in "$@"; do
    case $part in
    agreement | waits | throughput | minute) ;;
    *) echo "no part $part: see the head of $0" >&2; exit 2 ;;
    esac
done

part() { # run one, within ten minutes
    within="timeout -k 5 600 python3"
    case $1$dry in
    throughput) $within benchmarks/gpu_training.py --rounds 3 --warmup 2 --steps 10 --out ;;
    throughput--dry)
        $within benchmarks/gpu_training.py --device cpu --precision fp32 --tiny --rounds 1 \
            --warmup 1 --steps 1 --matmul 64 --backend eager --out
        ;;
    minute) # the first 94% by a ViT
        $within -m vitascope train --data "$data" --minutes 2 --run "$OUT/minute" --embed-dim 192 --depth 4 \
            --num-heads 3 --model-options 'tokenizer_widths=[64, 128]' --batch-size 512 --lr 0.006 --compile on
        ;;
    minute--dry)
        $within -m vitascope train --data digits --minutes 0.08 --run "$OUT/minute" --device cpu --embed-dim 16 \
            --depth 1 --num-heads 1
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
    for package in tyro timm; do
        python3 -c "import $package" 2>/dev/null ||
            python3 -m pip install --quiet --no-index --find-links "$wheels" "$package" || exit 1
    done
fi
failed=
for name in "$@"; do
    echo "== $name"
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
