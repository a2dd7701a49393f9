"""Compares the log-probabilities of two programs, as in reinforcement learning."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import ArrayLike

from jaxmp._tools.diagnostics.inputs import check_numbers


@dataclasses.dataclass(frozen=True)
class LogProbGap:
    """How far the log-probabilities of the same tokens are apart in two programs, in nats.

    Attributes:
      mean: the mean of the magnitude of the difference.
      rms: the root of its mean square.
      largest: the largest.
      outside: the share of tokens whose ratio of probabilities is outside of the band.
      band: the band.
      k1: the mean of `sampler - trainer`, an estimate of the KL divergence of sampler from trainer
        for tokens that the sampler drew; it may be negative.
      k3: the mean of `ratio - 1 - log(ratio)` for the ratio trainer / sampler: an estimate of the
        same that is never negative and varies less (Schulman, "Approximating KL divergence", 2020).
      tokens: how many tokens were compared.
    """

    mean: float
    rms: float
    largest: float
    outside: float
    band: tuple[float | int, float | int]
    k1: float
    k3: float
    tokens: int

    def __str__(self) -> str:
        low, high = self.band
        return (
            f"log-probabilities of {self.tokens:,} tokens: {self.mean:.2g} nats apart in the mean, "
            f"{self.rms:.2g} rms, {self.largest:.2g} at most; ratio outside of [{low:g}, {high:g}] "
            f"for {self.outside:.2%}; KL {self.k1:.2g} (k1), {self.k3:.2g} (k3)"
        )


def log_prob_gap(
    trainer: ArrayLike,
    sampler: ArrayLike,
    *,
    mask: ArrayLike | None = None,
    band: tuple[float | int, float | int] = (0.5, 2.0),
) -> LogProbGap:
    """Compares the log-probabilities that two programs give to the same tokens.

    In reinforcement learning the sampler draws tokens, and the trainer weighs them by the ratio of
    its probability to the sampler's. Both run the same weights, so that this ratio should be one;
    rounding makes it another, and training is off-policy without a word (arXiv 2510.26788, 2025).

    Args:
      trainer: the log-probability of each token in the program that is trained, any shape.
      sampler: the same in the program that drew them.
      mask: which tokens count; all by default.
      band: the ratios that count as near.

    Returns:
      The gap.

    Raises:
      TypeError: for arrays without numbers, as under `jit`.
      ValueError: for shapes that differ, a mask without tokens, numbers that are not finite or
        above zero, or a band that does not hold 1.

    >>> gap = log_prob_gap(np.array([-1.0, -2.0]), np.array([-1.0, -3.0]))
    >>> gap.mean, gap.outside, gap.k1
    (0.5, 0.5, -0.5)
    """
    check_numbers((trainer, sampler, mask), "log_prob_gap")
    # In float64: the gap of two programs in float32 is of the size of their roundings.
    ours, theirs = (
        _log_probabilities(x, name) for x, name in ((trainer, "trainer"), (sampler, "sampler"))
    )
    mask = np.ones(ours.shape, bool) if mask is None else np.asarray(mask, bool)
    if not ours.shape == theirs.shape == mask.shape:
        raise ValueError(
            "trainer, sampler and mask must have one shape, a number for each token; got "
            f"{ours.shape}, {theirs.shape} and {mask.shape}"
        )
    low, high = band
    if not 0 <= low <= 1 <= high:
        raise ValueError(f"band must hold 1, the ratio of equal probabilities, got {band!r}")
    if not mask.any():
        raise ValueError("no token to compare: the mask is false everywhere, or there are none")
    log_ratio = (ours - theirs)[mask]
    # Probabilities may be apart by more than float64 holds.
    with np.errstate(over="ignore"):
        # `ratio - 1` would cancel for ratios near one, and k3 is of the size of that error.
        ratio, ratio_minus_1 = np.exp(log_ratio), np.expm1(log_ratio)
    size = np.abs(log_ratio)
    return LogProbGap(
        float(size.mean()),
        float(np.sqrt(np.mean(size**2))),
        float(size.max()),
        float(np.mean((ratio < low) | (ratio > high))),
        (float(low), float(high)),
        float(-log_ratio.mean()),
        float(np.mean(ratio_minus_1 - log_ratio)),
        int(log_ratio.size),
    )


def _log_probabilities(values: Any, name: str) -> Any:
    numbers = np.asarray(values).astype(np.float64)
    if not np.isfinite(numbers).all():
        raise ValueError(
            f"{name} has log-probabilities that are not finite. Leave padding out by mask, after "
            "jnp.where(mask, values, 0)"
        )
    # A log-softmax in 16 bits may round to just above zero.
    if (numbers > 1e-3).any():
        raise ValueError(
            f"{name} has values up to {numbers.max():g}: log-probabilities are not > 0"
        )
    return numbers
