"""Says which part of a program needs more bits: the error that lowering each alone puts on it."""

import contextlib
import math
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
from jaxtyping import PyTree

from jaxmp._autocast.api import autocast
from jaxmp._diagnostics.precision_parts import Group, Part, computes_low, parts_of
from jaxmp._diagnostics.sensitivity_report import (
    Errors,
    Of,
    PartSensitivity,
    SensitivityReport,
)
from jaxmp._jaxpr import compat
from jaxmp._jaxpr.tracing import combine, partition, trace_call
from jaxmp._numerics.tree import all_finite, split_floats, widen
from jaxmp._policies.patterns import Pattern
from jaxmp._policies.policy import get_policy
from jaxmp._policies.policy_rules import PolicyRules
from jaxmp._policies.presets import dtypes_of
from jaxmp._training.gradients import value_and_grad

# Below this share of the error of all parts together, the errors of parts alone do not explain it:
# a value is rounded only if both its maker and its reader are low.
_EXPLAINED = 0.7


def sensitivity(
    loss_fn: Callable[..., Any],
    params: PyTree,
    *args: Any,
    low: str | jmp.Policy = "mixed_bfloat16",
    candidates: Iterable[Pattern] | None = None,
    reference: str | jmp.Policy = "float32",
    loss_scale: float | None = None,
    has_aux: bool = False,
    max_evaluations: int = 64,
    **kwargs: Any,
) -> SensitivityReport:
    """Measures which parts of a program need more bits, and gives rules that keep these.

    Each part is lowered alone, and loss, outputs and gradients are compared with those of the
    reference. That is one evaluation for each part and two more: the best set of parts to keep,
    of all sets, would take two to the power of their number. Errors of parts add up like those of
    independent roundings, so that the parts with the largest errors alone are those to keep. Where
    they do not add up, since parts round only together, each part is also measured the other way
    round: it alone is kept.

    A part of a program is a linen module or what is in a `jax.named_scope`, with all layers of a
    scan as one. Operations outside of scopes are a part too.

    Args:
      loss_fn: `loss_fn(params, *args, **kwargs)`, as given to `make_train_step`, without a policy
        of its own. It is put under `jaxmp.autocast`.
      params: the params, or a live nnx model.
      *args: the batch, and other arguments.
      low: the policy to try: `"mixed_bfloat16"`, `"mixed_float16"`, `"mixed_float8"`.
      candidates: the patterns of the parts to try, as in `PolicyRules`: each is one part. What
        none of them matches stays in the reference's precision. None tries every scope.
      reference: the policy that errors are relative to.
      loss_scale: the loss scale. None finds one for float16: the largest up to 2**16, in steps of
        16, with finite gradients.
      has_aux: whether `loss_fn` returns `(loss, outputs)`.
      max_evaluations: how many parts to measure at the most. If there are more, modules are
        measured as a whole first, and those with the largest errors are taken apart.
      **kwargs: further arguments of `loss_fn`.

    Returns:
      The report: `report.rows`, `report.rules(target=0.01)`, `print(report)`.

    Raises:
      ValueError: if nothing in the program has a name, a pattern matches nothing, the reference is
        not finite, or an option is wrong.
      TypeError: if it is called under `jit`.

    >>> def loss_fn(params, x):
    ...     with jax.named_scope("wide"):
    ...         h = x @ params["wide"] - 1000.0
    ...     with jax.named_scope("out"):
    ...         return jnp.mean((h @ params["out"]) ** 2)
    >>> params = {"wide": jnp.full((8, 8), 125.01), "out": jnp.eye(8)}
    >>> report = sensitivity(loss_fn, params, jnp.ones((4, 8)))
    >>> report.rows[0].path, report.evaluations
    ('wide', 4)
    >>> print(report.rules(target=0.05))
    /wide      float32
    (default)  mixed_bfloat16
    """
    if isinstance(max_evaluations, bool) or max_evaluations < 1:
        raise ValueError(f"max_evaluations must be at least 1, got {max_evaluations!r}")
    if loss_scale is not None and not loss_scale > 0:
        raise ValueError(f"loss_scale must be positive, got {loss_scale!r}")
    loss_fn, params = _of_arrays(loss_fn, params)
    low_policy, high = get_policy(low), get_policy(reference)
    measuring = Measuring(loss_fn, ((params, *args), kwargs), has_aux, PolicyRules(default=high))
    parts = parts_of(measuring.program, candidates)

    def rules_of(lowered: Collection[Part]) -> PolicyRules:
        return parts.rules(lowered, low_policy, high)

    everything = rules_of(parts.parts)
    scales = not loss_scale and jnp.float16 in dtypes_of(PolicyRules(default=low_policy))
    measuring.set_scale(everything, loss_scale or 1.0, find=scales)
    all_low = measuring.errors(everything)
    found = _alone(measuring, rules_of, parts.parts, max_evaluations)
    if not _explain([errors for _, errors in found], all_low):
        rest = [[x for x in parts.parts if x not in group.parts] for group, _ in found]
        without = [measuring.errors(rules_of(lowered)) for lowered in rest]
    else:
        without = [None] * len(found)
    rows = [_Row(*pair, other) for pair, other in zip(found, without, strict=True)]
    ordered = _ordered(rows, all_low, "gradients")
    flops = sum(part.flops for part in parts.parts) or 1

    def rules_keeping(count: int, of: Of) -> PolicyRules:
        kept = {x for row in _ordered(rows, all_low, of)[:count] for x in row.group.parts}
        return rules_of([part for part in parts.parts if part not in kept])

    return SensitivityReport(
        tuple(row.shown(flops) for row in ordered),
        low_policy,
        high,
        all_low,
        measuring.scale,
        measuring.evaluations,
        _measure=measuring.errors,
        _rules=rules_keeping,
    )


class _Row(NamedTuple):
    group: Group
    alone: Errors
    without: Errors | None

    def shown(self, flops: int) -> PartSensitivity:
        share = sum(part.flops for part in self.group.parts) / flops
        return PartSensitivity(self.group.name, self.alone, self.without, share)

    def gain(self, all_low: Errors, of: Of) -> float:
        """Returns how much squared error goes away if it is kept, by the larger of both views."""
        alone = self.alone.of(of) ** 2
        if self.without is None:
            return alone
        rest = self.without.of(of)
        if math.isinf(rest):
            return alone
        return max(alone, all_low.of(of) ** 2 - rest**2)


def _ordered(rows: list[_Row], all_low: Errors, of: Of) -> list[_Row]:
    return sorted(rows, key=lambda row: row.gain(all_low, of), reverse=True)


def _explain(alone: list[Errors], all_low: Errors) -> bool:
    """Whether the errors of parts alone add up to the error of all parts."""
    total = math.sqrt(sum(errors.gradients**2 for errors in alone))
    return total >= _EXPLAINED * all_low.gradients


def _alone(
    measuring: "Measuring",
    rules_of: Callable[[Collection[Part]], PolicyRules],
    parts: tuple[Part, ...],
    limit: int,
) -> list[tuple[Group, Errors]]:
    """Measures parts alone; if there are too many, groups of them, and takes the worst apart."""

    def measured(groups: list[Group]) -> list[tuple[Group, Errors]]:
        return [(group, measuring.errors(rules_of(group.parts))) for group in groups]

    if len(parts) <= limit:
        return measured([Group(part.name, (part,), 0) for part in parts])
    found = measured(Group("", parts, 0).taken_apart())
    count = len(found)
    while True:
        several = [pair for pair in found if len(pair[0].parts) > 1]
        if not several:
            return found
        worst = max(several, key=lambda pair: pair[1].gradients)
        smaller = worst[0].taken_apart()
        if count + len(smaller) > limit:
            return found
        count += len(smaller)
        found = [pair for pair in found if pair is not worst] + measured(smaller)


class Measuring:
    """Evaluates a loss under rules, and compares it with a reference.

    Args:
      loss_fn: the loss.
      call: `(args, kwargs)`, of which the first argument is the params.
      has_aux: whether it returns outputs beside the loss.
      reference: the rules of the reference.
    """

    def __init__(
        self, loss_fn: Callable[..., Any], call: Any, has_aux: bool, reference: PolicyRules
    ) -> None:
        self._loss_fn, self._has_aux = loss_fn, has_aux
        self._static, self._arrays = partition(call)
        if any(map(compat.is_traced, self._arrays)):
            raise TypeError(
                "sensitivity looks at numbers, and under jit there are none: call it outside, with "
                "params and a batch"
            )
        self.program = trace_call(loss_fn, self._static, self._arrays).closed
        self._always_low = computes_low(self.program)
        self._known: dict[PolicyRules, Errors] = {}
        self.evaluations = 0
        self.scale = 1.0
        self._reference = self._evaluated(self._compiled(reference))
        if not all_finite(self._reference):
            raise ValueError(
                "the loss, the outputs or a gradient are not finite in the reference, so that "
                "nothing can be compared with them. jaxmp.diagnostics.find_overflow names the "
                "operation"
            )
        self._known[reference] = self._compared(self._reference)

    def set_scale(self, rules: PolicyRules, scale: float, *, find: bool) -> None:
        """Sets the loss scale, or finds the largest at which these rules have finite gradients."""
        self.scale = 2.0**16 if find else scale
        run = self._compiled(rules)
        while True:
            made = self._evaluated(run)
            if not find or self.scale == 1 or all_finite(made[2]):
                break
            self.scale /= 16
        self._known[rules] = self._compared(made)

    def errors(self, rules: PolicyRules) -> Errors:
        """Returns the errors of the loss under rules; each rules are evaluated once."""
        if rules not in self._known:
            if self._always_low or self._lowers(rules):
                self._known[rules] = self._compared(self._evaluated(self._compiled(rules)))
            else:
                self._known[rules] = self._compared(self._reference)
        return self._known[rules]

    def _lowers(self, rules: PolicyRules) -> bool:
        """Whether anything is low under rules; if nothing is, no evaluation is needed."""
        with _quiet():
            fun = autocast(self._loss_fn, rules)
            return computes_low(trace_call(fun, self._static, self._arrays).closed)

    def _compiled(self, rules: PolicyRules) -> Callable[..., Any]:
        @jax.jit
        def run(scale: Any, *arrays: Any) -> Any:
            args, kwargs = combine(self._static, arrays)
            fun = autocast(self._loss_fn, rules)
            gradient = value_and_grad(fun, has_aux=self._has_aux, loss_scale=scale)
            out, gradients = gradient(*args, **kwargs)
            loss, outputs = out if self._has_aux else (out, ())
            return tuple(widen(split_floats(tree)[0]) for tree in (loss, outputs, gradients))

        return run

    def _evaluated(self, run: Callable[..., Any]) -> Any:
        self.evaluations += 1
        with _quiet():
            return run(jnp.float32(self.scale), *self._arrays)

    def _compared(self, made: Any) -> Errors:
        loss, outputs, gradients = (float(x) for x in _relative(made, self._reference))
        return Errors(loss, outputs if self._reference[1] else None, gradients)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps warnings back: of rules that lower one part, they say nothing about the user's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@jax.jit
def _relative(made: Any, reference: Any) -> list[Any]:
    return [relative_error(*pair) for pair in zip(made, reference, strict=True)]


def relative_error(made: Sequence[Any], reference: Sequence[Any]) -> Any:
    """Returns the norm of a difference divided by that of the reference, over all arrays together.

    Args:
      made: arrays.
      reference: arrays like them, finite.

    Returns:
      A number: infinite if `made` is not finite, or differs from a reference of zeros.
    """
    if not reference:
        return jnp.zeros(())
    # Divided by the largest number, so that squares stay in range.
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(x), initial=0) for x in reference]))
    unit = jnp.where(largest > 0, largest, 1)
    size = sum(jnp.sum(jnp.abs(x / unit) ** 2) for x in reference)
    pairs = zip(made, reference, strict=True)
    off = sum(jnp.sum(jnp.abs((x - y) / unit) ** 2) for x, y in pairs)
    error = jnp.sqrt(off / size)  # 0 / 0 is no error
    return jnp.where(off == 0, 0.0, jnp.where(jnp.isfinite(error), error, jnp.inf))


def _of_arrays(loss_fn: Callable[..., Any], params: PyTree) -> tuple[Callable[..., Any], PyTree]:
    """Returns a loss of plain arrays and its params, where the params are a live nnx model."""
    nnx = sys.modules.get("flax.nnx")  # without Flax there are no nnx modules
    if nnx is None or not isinstance(params, nnx.Module):
        return loss_fn, params
    from jaxmp._flax.nnx_scopes import with_plain_params

    return with_plain_params(loss_fn, params)
