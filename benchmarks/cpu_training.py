"""Compare the training throughput of a ViT on this CPU: ours, timm's and transformers'.

    .venv/bin/python benchmarks/cpu_training.py [--out]

One training step (forward, loss, backward, AdamW, zero_grad) of ViT-Ti/4 at 32 pixels with 10 classes, batch
128, in fp32 and under bf16 autocast. Ours is a step of `vitascope train`: fused AdamW, an allocator that
keeps freed memory, and a row of its own for the precision that `auto` chooses. The peers run with PyTorch's
defaults. One more row runs timm with our allocator setting, to separate the effect of the setting from that
of the code. The script takes about 4 minutes on 2 idle cores.
"""

from conditions import installed_peers
from contest import (
    Contest,
    Entrant,
    comparison_table,
    heading,
    matmul_entrants,
    missing_peers,
    options,
    timing_of,
)
from contestants import named_vit, peer_training_entrant, training_entrants
from reports import publish

CONFIG = named_vit("vit_ti16", image_size=32, patch_size=4, num_classes=10)
BATCH_SIZE = 128
COMPARED = ("timm", "transformers")

NOTES = """\
"of timm": images per second over timm's in the same dtype. "of the ceiling": operations per second of the
model's matrix products, three forward passes per step, over those of the fastest matrix product in the same
dtype. Ours has fused AdamW and an allocator that keeps freed memory, as in `vitascope train`. The peers have
PyTorch's defaults, except in the row with our allocator setting."""


def entrants() -> list[Entrant]:
    peers = [peer for peer in COMPARED if peer in installed_peers()]
    found = [
        peer_training_entrant(peer, CONFIG, BATCH_SIZE, precision)
        for peer in peers
        for precision in ("fp32", "bf16")
    ]
    if "timm" in peers:
        found.append(peer_training_entrant("timm", CONFIG, BATCH_SIZE, "bf16", our_allocator=True))
    return found + training_entrants(CONFIG, BATCH_SIZE, ("fp32", "bf16", "auto"))


def main() -> None:
    arguments = options(__doc__, rounds=3, warmup=2, steps=5).parse_args()
    report = heading("Training on a CPU: ViT-Ti/4 at 32 pixels, batch 128", arguments)
    with Contest(arguments.rounds, timing_of(arguments)) as contest:
        results = contest.run("training", [*entrants(), *matmul_entrants()])
    report += f"\n\n{comparison_table(results)}\n\n{missing_peers(COMPARED)}{NOTES}"
    publish("cpu_training", report, arguments)


if __name__ == "__main__":
    main()
