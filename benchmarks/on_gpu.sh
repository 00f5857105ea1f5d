#!/bin/sh
# What needs a GPU, in parts of at most ten minutes each. Reports go to benchmarks/results.
#
#     sh benchmarks/on_gpu.sh tests
#     sh benchmarks/on_gpu.sh throughput
#     sh benchmarks/on_gpu.sh minute cifar10.tar.xz
#     sh benchmarks/on_gpu.sh accuracy cifar10.tar.xz SEED
#
# The last two take a DATA argument with CIFAR-10; without a network, an archive of its images as files.
set -eu
part=$1
data=${2:-cifar10}
runs=$(mktemp -d)
trap 'rm -rf "$runs"' EXIT

case $part in
tests) # the parts of the suite that choose their device, then each command on the GPU
    python3 -m pytest -q -n 8 tests/model tests/training tests/explain tests/predict
    train="python3 -m vitascope.cli train --data digits --device cuda"
    $train --epochs 2 --run "$runs/digits"
    $train --minutes 0.5 --recipe small-data --image-size 32 --precision bf16 --compile --run "$runs/compiled"
    torchrun --standalone --nproc-per-node 1 -m vitascope.cli -- \
        train --data digits --epochs 2 --parallel fsdp --run "$runs/fsdp"
    python3 -m vitascope.cli pretrain --data digits --image-size 32 --target mae --epochs 2 --run "$runs/mae"
    python3 -m vitascope.cli evaluate "$runs/digits"
    python3 -m vitascope.cli explain "$runs/digits" --compare
    ;;
throughput) # training steps and the loop beside timm's; explanations beside captum's and grad-cam's
    python3 benchmarks/gpu_training.py --peak-tflops 989 --out
    python3 benchmarks/explanations.py --out
    ;;
minute) # the first 94% by a ViT
    python3 benchmarks/same_minutes.py --data "$data" --minutes 2 --goal 0.94 --seeds 1 --only vitascope --out \
        embed_dim=192 depth=4 num_heads=3 'model_options={"tokenizer_widths": [64, 128]}' \
        batch_size=512 lr=0.006 compile=true
    ;;
accuracy) # the best of ten minutes, one seed after the other
    seed=${3:-0}
    again=$([ "$seed" -eq 0 ] || echo --resume)
    python3 benchmarks/same_minutes.py --data "$data" --minutes 8.5 --goal 0.96 --seeds $((seed + 1)) \
        --only vitascope --out $again \
        embed_dim=256 depth=6 patch_size=2 'model_options={"tokenizer_widths": [64]}' \
        batch_size=512 lr=0.004 randaugment=2 erase=0.25 cutmix=1.0 mixup=0.2 compile=true
    ;;
*)
    echo "no part $part: it is one of tests, throughput, minute, accuracy" >&2
    exit 2
    ;;
esac
