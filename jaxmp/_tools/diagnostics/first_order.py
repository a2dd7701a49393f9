"""Predicts what the roundings of a program do to its results, from a backward pass for each.

To first order, a rounding moves a result by its error times the derivative of the result. The
squares of these products add up to the variance of independent roundings. A random direction stands
for a result of many numbers: in the mean, squares along it are those of all numbers together.

CHEF-FP does so for C++ (Vassilev, Garg et al., 2023). Errors here are those that the program makes,
and no bounds: a bound on a transformer was 280 times too wide.
"""

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxmp._numerics.dtypes import DType, is_floating, is_inexact
from jaxmp._numerics.sizes import finite, norm, root_mean_square
from jaxmp._program.flops import product_flops
from jaxmp._program.op_classes import CASTS, CONTRACTIONS, MIXED_SHAPES, RUNNING
from jaxmp._program.program import read
from jaxmp._program.tracing import Traced
from jaxmp._tools.diagnostics.roundings import FLOAT32, in_float32, is_unseen, moves, rounds_low
from jaxmp._tools.diagnostics.smooth_comparisons import SmoothComparisons
from jaxmp._tools.inspect.equations import Site, all_sites, walk

# The compiler may leave roundings out, and does so differently on each device.
AS_WRITTEN = {"xla_allow_excess_precision": False}
# Errors of one line whose sum is beyond three standard deviations are not independent, as those of
# equal numbers. They count by their sum. So do float8 errors of a trained network, whose gradient
# is small: taken where the program is, and not where float32 is, it has their own effect on it.
_CHANCE = 3.0
# Along random signs a line may be so by chance, and its error at least three times too large. It
# doubled the error of the gradients of a small network.
_CHANCE_OF_SIGNS = 5.0


class ErrorBar(NamedTuple):
    """A number, and how far roundings may have moved it.

    Attributes:
      value: the number.
      deviation: one standard deviation: roundings moved it by no more in 68 % of cases, and by no
        more than twice that in 95 %.

    >>> print(ErrorBar(2.3012, 3.1e-4))
    2.3012 by 0.00031 (68 %), 0.00062 (95 %)
    """

    value: float
    deviation: float

    def __str__(self) -> str:
        bars = f"by {self.deviation:.2g} (68 %), {2 * self.deviation:.2g} (95 %)"
        return f"{self.value:.6g} {bars}"


class Target(NamedTuple):
    """An error to predict.

    Attributes:
      results: the results that it is about, among those that are floats.
      is_smooth: whether comparisons count, as smooth steps.
      each: whether each result is a target of its own, relative to its own size; if not, all are
        one, relative to the norm of all.
    """

    results: slice
    is_smooth: bool = False
    each: bool = False

    def directions(self, floats: Sequence[Any]) -> list[Any]:
        """Returns random signs for the numbers of the results, over the size of these.

        Relative errors: squares of small gradients would leave the range of float32.
        """
        # The same signs with steps and without: their difference is that of the steps.
        signs = [
            jax.random.rademacher(jax.random.key(seed), x.shape).astype(x.dtype)
            for seed, x in enumerate(floats)
        ]
        numbers = list(map(finite, floats))
        sizes = [norm([x] if self.each else numbers) for x in numbers]
        pairs = zip(signs, sizes, strict=True)
        return [x / jnp.where(size > 0, size, 1).astype(x.dtype) for x, size in pairs]


class FirstOrder:
    """The first-order errors of a traced program, for each kind of its roundings.

    Args:
      traced: the low program.
      key_of: returns the kind of an operation's roundings. Errors of one kind are added up.
      targets: the errors to predict.
      dtypes: other dtypes to round to, at the same places and with the same derivatives.
      float32: whether float32 operations round too.

    Attributes:
      keys: the kinds.
    """

    def __init__(
        self,
        traced: Traced,
        key_of: Callable[[Site], Hashable],
        targets: Sequence[Target],
        dtypes: Sequence[DType] = (),
        *,
        float32: bool = False,
    ) -> None:
        sites = [site for site in all_sites(walk(traced.closed)) if _rounds(site, float32)]
        self.keys = list(dict.fromkeys(map(key_of, sites)))
        self._others = len(dtypes)
        sizes = [x.size for x in traced.closed.out_avals if is_inexact(x)]
        own = [(sizes[target.results], target.each) for target in targets]
        is_one = [size == 1 for x, each in own for size in (x if each else [sum(x)])]
        self._chances = np.where(is_one, _CHANCE, _CHANCE_OF_SIGNS)[:, None, None]
        numbers = {key: number for number, key in enumerate(self.keys)}

        floats = [x.dtype for site in sites for x in site.out_avals if is_floating(x)]
        unit = max((float(jnp.finfo(dtype).eps) / 2 for dtype in floats), default=None)

        def run(probes: list[Any], target: Target, *arrays: Any) -> tuple[list[Any], list[Any]]:
            rules = _Probed(
                lambda site: probes[numbers[key_of(site)]],
                tuple(dtypes),
                float32,
                unit if target.is_smooth else None,
            )
            results = rules.run(read(traced.closed), list(map(in_float32, arrays)))
            return [x for x in results if is_inexact(x)][target.results], results

        def errors(*arrays: Any) -> list[Any]:
            probes = [jnp.zeros((1 + len(dtypes), 2), FLOAT32) for _ in self.keys]
            sums = []
            for target in targets:
                floats, pull, results = jax.vjp(
                    lambda x, target=target: run(x, target, *arrays), probes, has_aux=True
                )
                each, signs = jnp.eye(len(floats), dtype=bool), target.directions(floats)

                def along(chosen: Any, pull: Any = pull, signs: Any = signs) -> Any:
                    return jnp.array(pull([*map(jnp.where, chosen, signs, itertools.repeat(0))])[0])

                sums.append(lax.map(along, each if target.each else each.any(0, keepdims=True)))
            return [jnp.concatenate(sums), *results]

        axes = traced.axes
        if axes.mesh is not None:
            axes = axes._replace(specs=(jax.P(), *axes.specs))
        self._run = jax.jit(lambda *arrays: axes.run(errors, arrays), compiler_options=AS_WRITTEN)

    def __call__(self, arrays: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Runs the program once, forward, and backward for each target.

        Returns:
          The variances by target (or each of its results), key, and dtype (that of the program
          first), relative to the results of the target; and the results in float32.
        """
        sums, *results = self._run(*arrays)
        shape = len(sums), len(self.keys), 1 + self._others, 2
        total, squares = np.moveaxis(np.asarray(sums, np.float64).reshape(shape), -1, 0)
        # What overflows has no sum. A derivative that is not a number may hide any error.
        squares = np.nan_to_num(squares, nan=np.inf, posinf=np.inf)
        total = np.where(np.isfinite(squares), total, 0)
        return np.where(total**2 > self._chances**2 * squares, total**2, squares), results


class _Probed(SmoothComparisons):
    """Runs the low program, and counts its errors in the derivatives of zeros, its probes."""

    def __init__(
        self,
        probe_of: Callable[[Site], Any],
        dtypes: tuple[DType, ...],
        float32: bool,
        unit: float | None,
    ) -> None:
        super().__init__(unit)
        self._probe_of, self._dtypes, self._float32 = probe_of, dtypes, float32
        self._seeds = itertools.count()

    def rounded(self, site: Site, exact: Any, low: Any) -> Any:
        # One infinity would make all errors after it NaN: where the program overflows, the number
        # itself goes on, and the error of this operation alone is infinite.
        value = jnp.where(jnp.isfinite(low), low, exact)
        return _with_errors(self._dtypes, value, exact, low - exact, self._probe_of(site))

    def whole(self, site: Site, operands: list[Any]) -> list[Any]:
        results = super().whole(site, operands)
        if not self._float32 or rounds_low(site) or not _rounds(site, True):
            return results
        return [self._modelled(site, x) if is_floating(x) else x for x in results]

    def _modelled(self, site: Site, x: Any) -> Any:
        # The same operation without its rounding is not at hand: errors are as large as usual.
        # Those of a sum are as large as its terms, which may cancel; others as large as the number.
        terms = _terms_of(site)
        variance = (1 + terms**0.5 / 2) / 3
        size = jnp.abs(x) if terms <= 1 else root_mean_square(x)
        off = float(jnp.finfo(x.dtype).eps / 2 * variance**0.5) * size * self._hashed_signs(x)
        return _with_errors(self._dtypes, x, x, off, self._probe_of(site))

    def _hashed_signs(self, x: Any) -> Any:
        """Returns signs that depend on the bits of numbers: equal ones round alike."""
        # Random signs would be the same in each turn of a scan, and its errors add up.
        bits = lax.bitcast_convert_type(x.astype(FLOAT32), np.uint32) + np.uint32(next(self._seeds))
        return jnp.where((bits * np.uint32(2_654_435_761)) >> 31, 1, -1).astype(x.dtype)


def _rounds(site: Site, float32: bool) -> bool:
    """Whether an operation may round."""
    if moves(site) or is_unseen(site) or site.bodies:
        return False
    if rounds_low(site):
        return True
    has_wide = any(map(is_floating, site.out_avals)) and any(map(is_inexact, site.in_avals))
    return float32 and has_wide and site.name not in CASTS | MIXED_SHAPES


def _terms_of(site: Site) -> float:
    """Returns how many numbers an operation adds up, for each number of its result."""
    # Half of the variance of as many roundings as there are partial sums: compilers add in about
    # as many of these as each has terms.
    size = max(site.out_avals[0].size, 1)
    if site.name in CONTRACTIONS:
        return product_flops(site.equation) / (2 * size)
    if site.name in RUNNING:
        return float(site.in_avals[0].shape[site.params["axis"]])
    return float(site.in_avals[0].size / size)


def _rounded_to(x: Any, dtype: DType) -> Any:
    """Returns float32 numbers rounded to bfloat16 or float16, subnormal ones too."""
    # By arithmetic, which compilers fuse: casts must be kept apart (see `widen_rounded`).
    info = jnp.finfo(dtype)
    normal = lax.reduce_precision(x, info.nexp, info.nmant)
    if info.nexp == jnp.finfo(FLOAT32).nexp:
        return normal
    step = float(info.smallest_subnormal)
    return jnp.where(jnp.abs(x) < float(info.tiny), jnp.round(x / step) * step, normal)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_errors(dtypes: tuple[DType, ...], value: Any, exact: Any, off: Any, probe: Any) -> Any:
    return value


def _errors_forward(dtypes: Any, value: Any, exact: Any, off: Any, probe: Any) -> tuple[Any, Any]:
    return value, (exact, off)


def _errors_backward(dtypes: Any, residuals: Any, cotangent: Any) -> tuple[Any, ...]:
    exact, off = residuals
    columns = []
    for each in (off, *(_rounded_to(exact, dtype) - exact for dtype in dtypes)):
        # Masks of -1e9 become infinite in float16, and have no derivative.
        is_exact = (each == 0) | jnp.isnan(each) | (cotangent == 0)
        errors = jnp.where(is_exact, 0, each * cotangent).astype(FLOAT32)
        columns += [errors, errors**2]
    # All sums at once: as sums of their own, each would be compiled with the operations before it.
    zeros, axes = [jnp.zeros((), FLOAT32)] * len(columns), tuple(range(exact.ndim))
    sums = lax.reduce(columns, zeros, lambda x, y: list(map(lax.add, x, y)), axes)
    return None, cotangent, None, jnp.stack(sums).reshape(-1, 2)


_with_errors.defvjp(_errors_forward, _errors_backward)
