"""The figure of masked patch prediction: what was hidden, and what the model took it for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vitascope.explain import plots
from vitascope.report.figures import to_picture
from vitascope.run.run import Run


def draw_masked_patches(
    run: Run,
    rows: Mapping[str, npt.NDArray[np.uint8]],
    hidden: npt.NDArray[np.bool_],
    replaced: npt.NDArray[np.bool_],
    kept: npt.NDArray[np.bool_],
) -> dict[str, Path]:
    """Draw the run's `figures/masked.png`; returns its path by its name.

    Args:
        run: its `figures/` get the file.
        rows: pixels (n, C, H, W) by what they are; "given" is marked.
        hidden: which patches were [mask], (n, gh, gw).
        replaced: which were another patch, (n, gh, gw).
        kept: which were as they are, and asked for all the same, (n, gh, gw).
    """
    pictures = {name: [to_picture(pixels) for pixels in row] for name, row in rows.items()}
    figure = plots.draw_masked(pictures, hidden, replaced, kept)
    return {"masked": plots.save_figure(figure, run.figures / "masked.png")}
