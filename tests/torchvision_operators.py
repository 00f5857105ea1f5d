"""Makes torchvision, and what imports it, importable with a torch that its binary was not built for.

On import, torchvision registers Python implementations for two of its compiled operators; without the
binary those do not exist and the import fails, although nothing in the tests calls them.
"""

import torch

# Kept alive: the operators exist as long as this object.
declarations: torch.library.Library | None = None

try:
    import torchvision  # noqa: F401
except ModuleNotFoundError:
    pass  # not installed: the tests are skipped with this reason
except RuntimeError as error:
    if "torchvision::nms" not in str(error):
        raise
    declarations = torch.library.Library("torchvision", "DEF")
    declarations.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    declarations.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
