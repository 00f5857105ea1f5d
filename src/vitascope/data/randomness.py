"""Randomness as a function: draws depend on the seed and on counters, never on earlier draws.

The order of an epoch is f(seed, epoch) and an image's augmentation f(seed, epoch, index), so that a run
resumes exactly from two counters, with any number of workers.
"""

import numpy as np
import numpy.typing as npt

_REST = 11
"""Bits of 64 that a float64's fraction has no room for."""


def epoch_order(seed: int, epoch: int, length: int) -> npt.NDArray[np.int64]:
    """The order of an epoch: a permutation of range(length)."""
    return np.random.default_rng([seed, epoch]).permutation(length)


def step_seed(seed: int, step: int) -> int:
    """A seed for torch's generator at a training step, in [0, 2^63): dropout and drop path draw from it."""
    return int(_mix(_mix(np.array([seed], np.uint64)) + np.uint64(step))[0] >> np.uint64(1))


def uniform(seed: int, epoch: int, indices: npt.NDArray[np.int64], draws: int) -> npt.NDArray[np.float64]:
    """Independent uniform numbers in [0, 1), one row of `draws` for each index: (B, draws)."""
    return fractions(random_bits(seed, epoch, indices, draws))


def random_bits(seed: int, epoch: int, indices: npt.NDArray[np.int64], draws: int) -> npt.NDArray[np.uint64]:
    """Independent numbers of 64 random bits, one row of `draws` for each index: (B, draws)."""
    key = _mix(_mix(np.array([seed], np.uint64)) + np.uint64(epoch))
    rows = _mix(key + indices.astype(np.uint64))  # (B,)
    return _mix(np.add.outer(rows, np.arange(draws, dtype=np.uint64)))


def fractions(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Random bits as uniform numbers in [0, 1)."""
    return (bits >> np.uint64(_REST)).astype(np.float64) * 2.0**-53


def sorting_keys(bits: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], np.uint64]:
    """Different numbers in the order of random bits (B, N), equal bits by position; and a mask.

    The bits under the mask are the position, 0 to N - 1: sorting the keys is many times faster than argsort.
    Before them come the bits of `fractions`, so that the order is that of the fractions; fewer of them where
    positions have more than 11 bits.
    """
    room = max(_REST, (bits.shape[1] - 1).bit_length())
    mask = np.uint64(2**room - 1)
    return (bits & ~mask) | np.arange(bits.shape[1], dtype=np.uint64), mask


def crop_draws(seed: int, epoch: int, indices: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """The draws of an `Augmentation` for crops: area, ratio, x and y, uniform in [0, 1), (B, 4)."""
    return uniform(seed, epoch, indices, 4)


def _mix(counter: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64 (Steele, Lea and Flood 2014): a counter to 64 well-mixed bits; arithmetic is modulo 2^64."""
    with np.errstate(over="ignore"):
        z = counter + np.uint64(1)
        z *= np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            z ^= z >> np.uint64(shift)
            z *= np.uint64(factor)
        z ^= z >> np.uint64(31)
        return z
