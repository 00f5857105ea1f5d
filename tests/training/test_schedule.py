import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vitascope.errors import UserError
from vitascope.models.config import ViTConfig
from vitascope.models.sizes import named_config
from vitascope.training.options.groups import Optimization
from vitascope.training.options.recipes import TrainConfig
from vitascope.training.schedule import CORRECTED, SIDES, Schedule, TimeBudget, resized


def schedule(steps_per_epoch: int = 10, batch_size: int = 128, **options: Any) -> Schedule:
    return Schedule.of(Optimization(**options), batch_size, steps_per_epoch)


def rates(found: Schedule) -> list[float]:
    return [found.rate(step) for step in range(found.total(0))]


def test_the_rate_warms_up_linearly_then_falls_along_a_cosine_to_zero() -> None:
    found = schedule(epochs=10, warmup_epochs=2, lr=0.5)
    assert rates(found)[:20] == pytest.approx([0.5 * (step + 1) / 20 for step in range(20)])
    cosine = [0.25 * (1 + math.cos(math.pi * step / 80)) for step in range(80)]
    assert rates(found)[20:] == pytest.approx(cosine)
    assert found.rate(100) == pytest.approx(0)


@pytest.mark.parametrize(("kind", "last"), [("linear", 1 / 80), ("constant", 1.0)])
def test_other_schedules_fall_in_a_line_or_not_at_all(kind: str, last: float) -> None:
    rest = rates(schedule(epochs=10, warmup_epochs=2, lr=0.5, schedule=kind))[20:]
    assert rest == pytest.approx([0.5 * (1 - step / 79 * (1 - last)) for step in range(80)])


@pytest.mark.parametrize("epochs", [1, 8, 100])
def test_warm_up_is_a_twentieth_of_the_run_by_default(epochs: int) -> None:
    found = rates(schedule(40, epochs=epochs, lr=0.5))
    assert found.index(max(found)) == 2 * epochs - 1
    assert found[0] == pytest.approx(0.5 / (2 * epochs))


@pytest.mark.parametrize("warmup", [{"warmup_epochs": 5.0}, {"warmup_steps": 10_000}])
def test_warm_up_is_shortened_to_a_quarter_of_the_run(warmup: dict[str, float]) -> None:
    found = schedule(12, epochs=2, lr=1.0, **warmup)
    assert found.warmup == 6
    assert found.asked_warmup == warmup.get("warmup_steps", 60)
    assert rates(found)[:7] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1, 1])


def test_the_average_is_that_of_a_fiftieth_of_the_run_unless_named() -> None:
    assert schedule(epochs=100).average_decay == pytest.approx(1 - 1 / 20)
    assert schedule(epochs=100, ema=0.5).average_decay == 0.5


def test_a_run_has_one_length() -> None:
    lengths = {"epochs": 2, "steps": 5, "minutes": 1.0}
    for one, other in itertools.permutations(lengths, 2):
        with pytest.raises(UserError, match="both set the length"):
            TrainConfig(**{one: lengths[one], other: lengths[other]})
        with pytest.raises(UserError, match="both set the length"):
            TrainConfig.from_recipe("digits", **{one: lengths[one], other: lengths[other]})
        found = TrainConfig(**{one: lengths[one]}).replace(**{other: lengths[other]})
        assert (found.option(one), found.option(other)) == (None, lengths[other])


@given(
    first=st.integers(1, 200),
    corrections=st.lists(st.tuples(st.integers(1, 50), st.integers(1, 200)), max_size=5),
    warmup=st.integers(0, 300),
)
def test_a_corrected_schedule_has_no_jump_and_ends_at_zero(first, corrections, warmup) -> None:
    found = schedule(7, epochs=None, steps=first, warmup_steps=warmup, lr=1.0)
    step, total, largest = 0, first, 1 / first
    for ahead, left in corrections:
        step += ahead
        if step >= total:
            break
        total = step + left
        before = found.progress(step), found.rate(step)
        found = found.correct(step, total)
        assert found.progress(step) == pytest.approx(before[0])
        largest = max(largest, (1 - before[0]) / left)
    progress = [found.progress(step) for step in range(total + 1)]
    assert progress[0] == 0
    assert progress[-1] == pytest.approx(1)
    assert all(0 < after - now <= largest + 1e-9 for now, after in itertools.pairwise(progress))
    assert found.rate(total) == pytest.approx(0, abs=1e-9)


def test_recorded_lengths_give_the_same_schedule_again() -> None:
    found = schedule(epochs=None, steps=100).correct(20, 150).correct(60, 90)
    again = schedule(epochs=None, lengths=found.lengths)
    assert rates(again) == rates(found)
    assert (again.total(0), again.total(20), again.total(60)) == (100, 150, 90)


def simulate(
    speed: Any, per_step: float = 0.1, progressive: float = 0.0, power: float = 2.0
) -> tuple[float, int]:
    """Run a budget of 100 s on a machine whose step takes `speed(time)` seconds; time and corrections.

    With progressive resizing, the time of a step on small images falls with this power of their side.
    """
    budget = TimeBudget(100.0, validation=0.5)
    total = budget.first_length(per_step)
    validations = budget.validations
    found = schedule(50, epochs=None, lengths=((0, total),), validations=validations, progressive=progressive)
    passed, step = 0.0, 0
    while step < found.total(step):
        taken = speed(passed) * found.side(step) ** power
        budget.stepped(taken, found.side(step) ** 2)
        passed, step = passed + taken, step + 1
        if found.validates(step):
            passed += 0.5
        corrected = budget.correction(found, step, passed)
        if corrected is not None and step < found.total(step):
            found = found.correct(step, corrected)
    return passed, len(found.lengths)


def test_a_run_ends_with_its_time_whatever_its_first_steps_promised() -> None:
    for actual in (0.02, 0.1, 0.3):
        passed, corrections = simulate(lambda passed, actual=actual: actual)
        assert passed == pytest.approx(100, rel=0.02)
        assert 10 <= corrections <= 1 + len(CORRECTED)


def test_a_machine_that_becomes_twice_as_slow_ends_at_most_a_tenth_later() -> None:
    for when in (0, 1, 30, 50, 52, 68, 90, 95, 99):
        passed, _ = simulate(lambda passed, when=when: 0.1 if passed < when else 0.2)
        assert passed <= 110


def test_a_run_that_begins_with_small_images_ends_with_its_time() -> None:
    for progressive, power in itertools.product((0.3, 0.5, 0.9), (1.5, 2.0, 2.5)):
        passed, _ = simulate(lambda passed: 0.1, progressive=progressive, power=power)
        assert passed == pytest.approx(100, rel=0.03)


def validated(found: Schedule) -> list[int]:
    return [step for step in range(1, found.total(0) + 1) if found.validates(step)]


def test_validations_follow_each_epoch_and_the_last_step() -> None:
    assert validated(schedule(epochs=3)) == [10, 20, 30]
    assert validated(schedule(epochs=None, steps=25)) == [10, 20, 25]


@given(st.integers(1, 20), st.integers(20, 3000), st.integers(1, 500))
def test_a_number_of_validations_divides_the_schedule_evenly(count: int, total: int, per_epoch: int) -> None:
    found = validated(schedule(per_epoch, epochs=None, lengths=((0, total),), validations=count))
    assert len(found) == count
    assert found[-1] == total
    assert all(abs(step - total * (place + 1) / count) <= 1 for place, step in enumerate(found))


def test_validations_take_a_tenth_of_the_budget_at_most() -> None:
    for seconds, validation, count in ((1800, 2.0, 20), (180, 2.0, 9), (60, 30.0, 1), (600, 0.0, 20)):
        assert TimeBudget(seconds, validation).validations == count


def test_the_sides_of_images_rise_over_the_first_share_of_the_schedule() -> None:
    found = schedule(epochs=10, progressive=0.3)
    sides = [found.side(step) for step in range(101)]
    assert sides == [*np.repeat(SIDES, [10, 10, 10, 70]), 1.0]
    assert list(SIDES) == sorted(SIDES)
    costs = [found.side(step) ** 2 for step in range(100)]
    for step in (0, 10, 20, 30, 65, 99):
        rest, before = np.mean(costs[step:]), np.mean(costs[: max(1, step)])
        measured = found.mean_cost(found.progress(step), 1.0), found.slowdown(step)
        assert measured == pytest.approx((rest, rest / before))
    assert [schedule(epochs=10).side(step) for step in (0, 99, 100)] == [1.0, 1.0, 1.0]
    assert schedule(epochs=10).slowdown(50) == pytest.approx(1)


def test_small_images_consist_of_whole_patches() -> None:
    assert [resized(ViTConfig(image_size=32, patch_size=4), side)[0] for side in SIDES] == [20, 24, 28, 32]
    assert resized(ViTConfig(image_size=32, patch_size=16), 5 / 8) == (32, 32)  # 20 pixels are two patches
    assert resized(ViTConfig(image_size=(64, 48), patch_size=8), 3 / 4) == (48, 40)
    assert resized(named_config("resnet29_w16_cifar", image_size=36), 5 / 8) == (23, 23)


def test_a_resumed_budget_is_corrected_next_at_the_next_share() -> None:
    found = schedule(50, epochs=None, lengths=((0, 1000),))
    budget = TimeBudget(100.0, 0.0, progress=found.progress(520))
    for step in range(521, 534):
        budget.stepped(0.1)
        assert budget.correction(found, step, passed=step / 10) is None
    budget.stepped(0.1)
    assert budget.correction(found, 534, passed=53.4) == pytest.approx(1000, abs=1)
