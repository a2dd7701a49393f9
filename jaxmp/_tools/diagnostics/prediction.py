"""The errors that the roundings of a loss and of its gradients make, by part and operation."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmp._numerics.sizes import norm
from jaxmp._numerics.tree import all_finite
from jaxmp._policies.policy_rules import PolicyRules
from jaxmp._policies.presets import all_policies, dtypes_of
from jaxmp._program.scopes import names_in
from jaxmp._program.tracing import Traced, combine
from jaxmp._tools.diagnostics.first_order import ErrorBar, FirstOrder, Target
from jaxmp._tools.diagnostics.precision_parts import Parts
from jaxmp._tools.diagnostics.roundings import place_of, readers_of, uncounted_in
from jaxmp._tools.diagnostics.sensitivity_report import Errors, OperationSensitivity, Variances
from jaxmp._tools.diagnostics.smooth_comparisons import compares_numbers
from jaxmp._tools.inspect.equations import Site, all_sites, walk
from jaxmp._tools.inspect.lines import direction, line_of, module_path, scopes_of
from jaxmp._tools.inspect.rows import grouped

_HALVES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_SCALES = (2.0**16, 2.0**12, 2.0**8, 2.0**4, 1.0)


class _RoundingKind(NamedTuple):
    """What roundings are counted together: those of an operation of the code."""

    parts: frozenset[str]
    path: str
    line: str
    operation: str
    direction: str


class Prediction:
    """The first-order errors of loss, outputs and gradients under rules.

    Args:
      traced: the program of loss, outputs and gradients under the rules.
      arrays: its arguments, of which the first is the loss scale.
      rules: the rules.
      parts: the parts of the program.
      find_scale: whether to find the loss scale.

    Attributes:
      dtypes: the dtypes whose errors are predicted beside those of the rules.
      scale: the loss scale.
      loss: the loss under the rules.
      uncounted: operations whose effect is not predicted.

    Raises:
      ValueError: if the loss, an output or a gradient is not finite even where nothing is rounded.
    """

    def __init__(
        self,
        traced: Traced,
        arrays: Sequence[Any],
        rules: PolicyRules,
        parts: Parts,
        find_scale: bool,
    ) -> None:
        self._traced, self._arrays, self._parts = traced, list(arrays), parts
        self._readers = readers_of(traced.closed, self._owner_of)
        numbers: Any = combine(traced.returned, range(len(traced.closed.out_avals)))
        loss, outputs, gradients = map(len, numbers)
        ends = (0, loss, loss + outputs, loss + outputs + gradients)
        self._has_outputs = outputs > 0
        slices = [slice(*pair) for pair in itertools.pairwise(ends)]
        targets = list(map(Target, slices))
        # Without comparisons, steps would be compiled for nothing.
        self._has_steps = any(map(compares_numbers, all_sites(walk(traced.closed))))
        if self._has_steps:
            targets.append(Target(slices[-1], is_smooth=True))
        # Of 8 bits the question is whether 16 would do, and of 16 bits which.
        has_codes = any(policy.products is not None for policy in all_policies(rules))
        others = [x for x in _HALVES if (x in dtypes_of(rules)) == has_codes]
        self.dtypes = [dtype.name for dtype in others]

        def kind_of(site: Site) -> _RoundingKind:
            scopes = scopes_of(site)
            operation = line_of(site), site.name, direction(scopes)
            return _RoundingKind(self._parts_of(site), module_path(scopes), *operation)

        first_order = FirstOrder(traced, kind_of, targets, others)
        self._kinds: list[Any] = first_order.keys
        counts = [i not in range(loss, loss + outputs) for i in range(ends[-1])]
        self.uncounted = uncounted_in(traced.closed, counts)
        variances, results = self._run(first_order, find_scale)
        if not all_finite(results):
            raise ValueError(
                "the loss, the outputs or a gradient are not finite even where nothing is rounded, "
                "so that nothing can be compared with them. jaxmp.diagnostics.find_overflow names "
                "the operation"
            )
        loss_value = float(results[0])
        # Of a loss of zero, errors are not relative.
        deviation = (abs(loss_value) or 1.0) * float(np.sqrt(variances[0, :, 0].sum()))
        self.loss = ErrorBar(loss_value, deviation)
        # By target, kind and dtype.
        jumps = np.zeros_like(variances[2])
        if self._has_steps:
            with np.errstate(invalid="ignore"):
                jumps = np.nan_to_num(np.maximum(variances[3] - variances[2], 0), posinf=np.inf)
        self._squares = np.stack([*variances[:3], jumps])

    def _run(self, first_order: FirstOrder, find_scale: bool) -> tuple[Any, list[Any]]:
        """Runs the program with its loss scale, or with the largest that lets nothing overflow."""

        def run(scale: float) -> tuple[Any, list[Any]]:
            self.scale = scale
            return first_order([jnp.float32(scale), *self._arrays[1:]])

        if not find_scale:
            return run(float(self._arrays[0]))
        # What overflows without a scale does so with each.
        least = np.isinf(run(1.0)[0]).sum()
        for scale in _SCALES:
            variances, results = run(scale)
            if np.isinf(variances).sum() <= least and all_finite(results):
                break
        return variances, results

    def errors_of(self, part: str | None = None, dtype: str | None = None) -> Errors:
        """Returns the errors that the roundings of a part make alone; those of all for None.

        They round to `dtype`; None for that of the rules.
        """
        column = 0 if dtype is None else 1 + self.dtypes.index(dtype)
        numbers = [i for i, kind in enumerate(self._kinds) if part in (None, *kind.parts)]
        return self._errors(numbers, column)

    def by_parts(self) -> dict[frozenset[str], Variances]:
        """Returns the variances by the parts that must all be high for them to vanish."""
        groups = self._numbers_by(lambda kind: kind.parts)
        return {parts: self._variances(numbers, 0) for parts, numbers in groups}

    def operations(self) -> tuple[OperationSensitivity, ...]:
        """Returns the errors of each operation of the code, those of gradients largest first."""
        rows = [
            OperationSensitivity(path, line, operation, direction_, self._errors(numbers))
            for (path, line, operation, direction_), numbers in self._numbers_by(lambda x: x[1:])
        ]
        return tuple(sorted(rows, key=lambda row: row.alone.gradients, reverse=True))

    def _numbers_by(self, label: Callable[[_RoundingKind], Any]) -> list[tuple[Any, list[int]]]:
        numbers = grouped(range(len(self._kinds)), lambda i: label(self._kinds[i]))
        return list(numbers.items())

    def _variances(self, numbers: Sequence[int], column: int) -> Variances:
        loss, outputs, *gradients = map(float, self._squares[:, numbers, column].sum(1))
        return Variances(loss, outputs if self._has_outputs else None, *gradients)

    def _errors(self, numbers: Sequence[int], column: int = 0) -> Errors:
        # Steps are as wide as the errors of the program, whatever the column.
        return self._variances(numbers, column).errors(float(self._squares[3, :, 0].sum()))

    def _owner_of(self, site: Site) -> str | None:
        owner = self._parts.owner(names_in(scopes_of(site)))
        return None if owner is None else owner.name

    def _parts_of(self, site: Site) -> frozenset[str]:
        """Returns the parts that must all be high for the roundings of an operation to vanish."""
        owners = {self._owner_of(site), *self._readers.get(place_of(site), ())}
        return frozenset(name for name in owners if name is not None)


def relative_errors(results: Any, reference: Any) -> Errors:
    """Returns the errors of lists of arrays: those of loss, outputs and gradients."""
    errors = [_relative_error(*pair) for pair in zip(results, reference, strict=True)]
    loss, outputs, gradients = map(float, errors)
    return Errors(loss, outputs if reference[1] else None, gradients)


@jax.jit
def _relative_error(arrays: Sequence[Any], reference: Sequence[Any]) -> Any:
    """Returns the norm of a difference divided by that of the reference, over all arrays."""
    size, off = norm(reference), norm([x - y for x, y in zip(arrays, reference, strict=True)])
    # Of two trees of zeros the quotient is NaN, and the error 0.
    return jnp.where(off == 0, 0.0, jnp.where(jnp.isfinite(off), off / size, jnp.inf))
