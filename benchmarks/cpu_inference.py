"""How fast ViT-B/16 classifies on this CPU: ours beside timm's, transformers' and torchvision's.

    .venv/bin/python benchmarks/cpu_inference.py [--out]

ViT-B/16 at 224 pixels with 1,000 classes, batches of 1 and of 8, in fp32 and bf16. Ours is
`TorchEngine.probabilities`, with a row for the precision that `auto` chooses: it takes bytes, and the time
holds their normalization and the softmax. The peers are the bare models on images that are normalized and in
their dtype already. Every entrant has random weights of its own. About 3 minutes on 2 quiet cores.
"""

from contest import (
    PEERS,
    Contest,
    Entrant,
    comparison_table,
    heading,
    installed_peers,
    matmul_entrants,
    missing_peers,
    options,
    timing_of,
)
from contestants import inference_entrants, peer_inference_entrant
from reports import publish
from vitascope.model.sizes import named_config

CONFIG = named_config("vit_b16")
BATCH_SIZES = (1, 8)

NOTES = """\
"of timm": times timm's images per second in the same dtype. "of the ceiling": operations of the model's
matrix products, counted for every token through every block, over those of the fastest matrix product in
the same dtype. Ours is `TorchEngine.probabilities`: bytes in, probabilities out, with an allocator that
keeps freed memory, as `vitascope predict` has. The peers get normalized images in their dtype and give
logits, under torch.inference_mode, with PyTorch's defaults, but for the row that says otherwise. Without
that setting a process may, by the luck of its heap, fault in the same memory in every pass: ours then made
28 to 31 images/s at batch 8 in some processes and 37 in others. Random weights, each its own."""


def entrants(batch_size: int) -> list[Entrant]:
    peers = installed_peers()
    found = [
        peer_inference_entrant(peer, CONFIG, batch_size, precision)
        for peer in peers
        for precision in ("fp32", "bf16")
    ]
    if "timm" in peers:
        found.append(peer_inference_entrant("timm", CONFIG, batch_size, "bf16", our_allocator=True))
    return found + inference_entrants(CONFIG, batch_size, ("fp32", "bf16", "auto"))


def main() -> None:
    arguments = options(__doc__, rounds=3, warmup=1, steps=4).parse_args()
    report = heading("Inference on a CPU: ViT-B/16 at 224 pixels", arguments)
    with Contest(arguments.rounds, timing_of(arguments)) as contest:
        for batch_size in BATCH_SIZES:
            results = contest.run(f"batch {batch_size}", [*entrants(batch_size), *matmul_entrants()])
            report += f"\n\n## Batch {batch_size}\n\n{comparison_table(results)}"
    publish("cpu_inference", f"{report}\n\n{missing_peers(PEERS)}{NOTES}", arguments)


if __name__ == "__main__":
    main()
