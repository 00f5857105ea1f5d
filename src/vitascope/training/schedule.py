"""The length of a run in steps, the share of it that is over, the learning rate, and a budget of time."""

import bisect
import dataclasses
import itertools
import math
from typing import Self

from vitascope.models.config import ViTConfig
from vitascope.models.sizes import ModelConfig
from vitascope.training.options.groups import Optimization

DEFAULT_WARMUP = 0.05
"""The share of a run that warms up if no option names a warm-up."""
LONGEST_WARMUP = 0.25
"""The largest share of a run that a warm-up takes; a longer one is shortened."""
SIDES = (5 / 8, 3 / 4, 7 / 8, 1.0)
"""The sides of the images of a run with progressive resizing, over that of the last ones: each but the last
for an equal part of the share `progressive`."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The length of a run and its learning rate, a function of the step.

    A budget of time may correct the length during the run. The steps that are left then cover what is left
    of the schedule: the learning rate does not jump, and it ends where it would have ended.

    Attributes:
        options: the peak rate, the warm-up and the decay.
        batch_size: images per step.
        steps_per_epoch: batches per epoch.
        lengths: (step, total) of the length in steps, at step 0 or where more epochs began, and of its
            corrections; steps ascend.
        validations: their number, at equal shares of the schedule; 0 validates after whole epochs.
        epochs_per_validation: their number: one or, with more validation than training images, as many as
            there are validation images per training image. A validated image takes about a third of the time
            of a trained one, so that validation takes at most a quarter of the run.
    """

    options: Optimization
    batch_size: int
    steps_per_epoch: int
    lengths: tuple[tuple[int, int], ...]
    validations: int = 0
    epochs_per_validation: int = 1

    @classmethod
    def of(
        cls, options: Optimization, batch_size: int, steps_per_epoch: int, *, epochs_per_validation: int = 1
    ) -> Self:
        """The schedule of recorded `lengths`, `steps` or `epochs`; of `minutes`, one step until measured."""
        steps = options.steps
        if steps is None:
            steps = (options.epochs or 0) * steps_per_epoch or 1
        return cls(
            options,
            batch_size,
            steps_per_epoch,
            options.lengths or ((0, steps),),
            options.validations,
            epochs_per_validation,
        )

    @property
    def begun(self) -> int:
        """The step at which the schedule began: 0, or where a finished run got more epochs."""
        return self.lengths[0][0]

    @property
    def first_length(self) -> int:
        """The steps of the schedule, before any correction."""
        return self.lengths[0][1] - self.begun

    def correct(self, step: int, total: int) -> Self:
        """The same schedule until `step`, and a length of `total` steps from there on."""
        before = tuple(pair for pair in self.lengths if pair[0] < step)
        return dataclasses.replace(self, lengths=(*before, (step, total)))

    def total(self, step: int) -> int:
        """The length of the run in steps that holds at `step`."""
        return next(total for since, total in reversed(self.lengths) if since <= step)

    def validates(self, step: int) -> bool:
        """Whether a validation follows `step` steps: at the end, and after epochs or shares of the run."""
        if step == self.total(step):
            return True
        count = self.validations
        if not count:
            return step % (self.steps_per_epoch * self.epochs_per_validation) == 0
        # Rounding may leave the end of a share just before it.
        return int(count * self.progress(step) + 1e-6) > int(count * self.progress(step - 1) + 1e-6)

    @property
    def epochs(self) -> int:
        """The number of epochs that the run begins."""
        return math.ceil(self.lengths[-1][1] / self.steps_per_epoch)

    def progress(self, step: int) -> float:
        """The share of the schedule that is over before `step`, in [0, 1]."""
        ends = [since for since, _ in self.lengths[1:]]
        left = 1.0
        for (since, total), end in zip(self.lengths, [*ends, step], strict=True):
            if since < step:
                left *= (total - min(end, step)) / (total - since)
        return 1 - left

    @property
    def ends(self) -> tuple[float, ...]:
        """The shares of the schedule up to which images have each of `SIDES`."""
        parts = len(SIDES) - 1
        return (*(self.options.progressive * (place + 1) / parts for place in range(parts)), math.inf)

    def side(self, step: int) -> float:
        """The side of a step's images over that of the last ones, by progressive resizing."""
        progress = self.progress(step) + 1e-9  # rounding may leave it below an end
        return SIDES[bisect.bisect(self.ends, progress)]

    def mean_cost(self, start: float, end: float) -> float:
        """The mean time of a step between two shares of the schedule, over that of one on whole images: about
        proportional to the pixels."""
        end = max(end, start + 1e-9)
        ends = [min(max(share, start), end) for share in (0.0, *self.ends)]
        parts = zip(SIDES, itertools.pairwise(ends), strict=True)
        return sum(side**2 * (last - first) for side, (first, last) in parts) / (end - start)

    def slowdown(self, step: int) -> float:
        """The mean cost of this step and all that follow, over that of the steps before it."""
        progress = self.progress(step)
        return self.mean_cost(progress, 1.0) / self.mean_cost(0.0, progress)

    @property
    def average_decay(self) -> float:
        """The decay of the moving average; by default, it averages about a fiftieth of the run."""
        if self.options.ema is not None:
            return self.options.ema
        return 1 - 1 / min(10_000, max(1, self.first_length / 50))

    @property
    def asked_warmup(self) -> int:
        """The steps of warm-up that the options name, or a share of the run."""
        options = self.options
        if options.warmup_steps is not None:
            return options.warmup_steps
        if options.warmup_epochs is not None:
            return round(options.warmup_epochs * self.steps_per_epoch)
        return round(DEFAULT_WARMUP * self.first_length)

    @property
    def warmup(self) -> int:
        """The steps of warm-up, in a run of the first length."""
        return min(self.asked_warmup, int(LONGEST_WARMUP * self.first_length))

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0: linear warm-up to the peak, then the decay."""
        options = self.options
        peak = options.lr if options.lr_batch is None else options.lr * self.batch_size / options.lr_batch
        warmup, progress = self.warmup / self.first_length, self.progress(step)
        if progress < warmup - 1e-9:  # rounding may leave the last step of warm-up below its end
            return peak * min(1.0, self.progress(step + 1) / warmup)
        passed = (progress - warmup) / (1 - warmup)
        if options.schedule == "constant":
            return peak
        if options.schedule == "linear":
            return peak * (1 - passed)
        return peak * 0.5 * (1 + math.cos(math.pi * passed))


def resized(config: ModelConfig, side: float) -> tuple[int, int]:
    """Height and width in pixels of images with this share of the side, in whole patches."""
    patch_h, patch_w = config.patch_hw if isinstance(config, ViTConfig) else (1, 1)
    H, W = config.image_hw
    return math.ceil(side * H / patch_h) * patch_h, math.ceil(side * W / patch_w) * patch_w


CORRECTED = (0.01, *(count / 30 for count in range(1, 30)))
"""The shares of the schedule after which a budget of time corrects the length of a run."""
FIRST_LENGTH = 20
"""The least length that a budget begins with; it is corrected after the first step."""
LAST_SHARE = 0.02
"""The share of the steps so far that a run takes at least to finish its schedule, if its time is over."""
VALIDATIONS = 20
"""The largest number of validations of a run with a budget of time."""
VALIDATION_SHARE = 0.1
"""The largest share of the budget that these validations take, apart from the last one."""


class TimeBudget:
    """Corrects the length of a run, so that it ends when its time is over.

    A machine that becomes slower has fewer steps left at the next correction. If it becomes twice as slow
    after the last correction, the run ends a twentieth later; whenever it does, at most a tenth later.

    Args:
        seconds: that the training loop may take, with validation and checkpoints.
        validation: seconds that a validation takes, as estimated.
        validations: their number, if it is known already.
        progress: the share of the schedule that is over.
    """

    def __init__(
        self, seconds: float, validation: float, *, validations: int | None = None, progress: float = 0.0
    ) -> None:
        self.seconds, self.validation = seconds, validation
        most = VALIDATION_SHARE * seconds / max(1e-9, validation)
        self.validations = int(max(1, min(VALIDATIONS, most))) if validations is None else validations
        self._steps, self._stepping = 0.0, 0.0  # since the last correction
        self._due = bisect.bisect(CORRECTED, progress)

    def first_length(self, per_step: float) -> int:
        """The length in steps of a run whose steps take `per_step` seconds on average, as estimated."""
        return max(FIRST_LENGTH, int(self._left(0.0, 0.0) / per_step))

    def stepped(self, seconds: float, cost: float = 1.0) -> None:
        """Count a step that took this time, and whose cost is a share of a whole step's."""
        self._steps, self._stepping = self._steps + cost, self._stepping + seconds

    def correction(self, schedule: Schedule, step: int, passed: float) -> int | None:
        """The corrected length if one is due before `step`, `passed` seconds after the start; else None."""
        progress = schedule.progress(step)
        due = bisect.bisect(CORRECTED, progress)
        if due == self._due or not self._steps:
            return None
        self._due = due
        per_step = self._stepping / self._steps * schedule.mean_cost(progress, 1.0)
        self._steps, self._stepping = 0.0, 0.0
        left = int(self._left(passed, progress) / per_step)
        return step + max(left, math.ceil(LAST_SHARE * step))

    def _left(self, passed: float, progress: float) -> float:
        """The seconds that are left for steps, without the validations to come."""
        validations = self.validations - int(self.validations * progress)
        return self.seconds - passed - validations * self.validation
