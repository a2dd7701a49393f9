"""Says which part of a program needs more bits: the error of lowering each part alone."""

import contextlib
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jmp
from jaxtyping import PyTree

from jaxmp._autocast.api import autocast
from jaxmp._numerics.tree import all_finite, split_floats, widen
from jaxmp._policies.patterns import Pattern
from jaxmp._policies.policy import get_policy
from jaxmp._policies.policy_rules import PolicyRules
from jaxmp._policies.presets import dtypes_of
from jaxmp._program.tracing import Traced, combine, partition, trace_call
from jaxmp._tools.diagnostics.inputs import check_numbers, number_of_scale
from jaxmp._tools.diagnostics.precision_parts import Parts, PrecisionPart, precision_parts_of
from jaxmp._tools.diagnostics.roundings import switched
from jaxmp._tools.diagnostics.sensitivity_report import (
    Errors,
    PartSensitivity,
    SensitivityReport,
)
from jaxmp._training.gradient_options import LossScaleLike
from jaxmp._training.gradients import value_and_grad

# The compiler may leave roundings out, and does so differently on each device. Rules that reach a
# target with all of them reach it without some.
_AS_WRITTEN = {"xla_allow_excess_precision": False}


def sensitivity(
    loss_fn: Callable[..., Any],
    params: PyTree,
    *args: Any,
    low: str | jmp.Policy = "mixed_bfloat16",
    candidates: Iterable[Pattern] | None = None,
    reference: str | jmp.Policy = "float32",
    loss_scale: LossScaleLike = None,
    has_aux: bool = False,
    **kwargs: Any,
) -> SensitivityReport:
    """Measures which parts of a program need more bits, and gives rules that keep these.

    The program in which everything is low runs in float32, with the roundings of one part alone.
    Its loss, outputs and gradients are compared with those without roundings. That is one
    evaluation for each part and four more, of three compiled programs; to try all sets of parts
    would take two to the power of their number. Errors of parts add up like those of independent
    roundings, so that the parts with the largest are those to keep.

    A part of a program is a linen module or a `jax.named_scope`, with all layers of a scan as one.
    Operations outside of scopes are a part too.

    Args:
      loss_fn: `loss_fn(params, *args, **kwargs)`, as given to `make_train_step`, without a policy
        of its own. It is put under `jaxmp.autocast`.
      params: the params, or a live nnx model.
      *args: the batch, and other arguments.
      low: the policy to try: `"mixed_bfloat16"`, `"mixed_float16"`, `"mixed_float8"`.
      candidates: the patterns of the parts to try, as in `PolicyRules`: each is one part. Other
        scopes stay in the precision of the reference. None tries every scope.
      reference: the policy that errors are relative to.
      loss_scale: the loss scale: a number, or `state.loss_scale`. None finds one for float16: the
        largest up to 2**16, in steps of 16, with finite gradients.
      has_aux: whether `loss_fn` returns `(loss, outputs)`.
      **kwargs: further arguments of `loss_fn`.

    Returns:
      The report: `report.rows`, `report.rules(target=0.01)`, `print(report)`.

    Raises:
      ValueError: if nothing in the program has a name, a pattern matches nothing, the reference is
        not finite, or an option is wrong.
      TypeError: for arrays without numbers, as under `jit`, or if `candidates` is one pattern.

    >>> def loss_fn(params, x):
    ...     with jax.named_scope("wide"):
    ...         h = x @ params["wide"] - 1000.0
    ...     with jax.named_scope("out"):
    ...         return jnp.mean((h @ params["out"]) ** 2)
    >>> params = {"wide": jnp.full((8, 8), 125.01), "out": jnp.eye(8)}
    >>> report = sensitivity(loss_fn, params, jnp.ones((4, 8)))
    >>> report.rows[0].path, report.evaluations
    ('wide', 6)
    >>> print(report.rules(target=0.05))
    /wide      float32
    (default)  mixed_bfloat16
    """
    scale = None if loss_scale is None else number_of_scale(loss_scale)
    nnx = sys.modules.get("flax.nnx")  # without Flax there are no nnx modules
    if nnx is not None and isinstance(params, nnx.Module):
        from jaxmp._flax.nnx_scopes import with_plain_params

        loss_fn, params = with_plain_params(loss_fn, params)
    low_policy, high = get_policy(low), get_policy(reference)
    measuring = Measuring(loss_fn, ((params, *args), kwargs), has_aux, PolicyRules(default=high))
    parts = precision_parts_of(measuring.program, candidates)

    def rules_of(lowered: Collection[PrecisionPart]) -> PolicyRules:
        return parts.rules(lowered, low_policy, high)

    everything = rules_of(parts.parts)
    has_float16 = jnp.dtype(jnp.float16) in dtypes_of(PolicyRules(default=low_policy))
    measuring.set_scale(everything, scale or 1.0, find=has_float16 and scale is None)
    switches = Switches(measuring, everything, parts)
    alone = [switches.errors({part}) for part in parts.parts]
    flops = sum(part.flops for part in parts.parts) or 1
    rows = [
        PartSensitivity(part.name, errors, part.flops / flops)
        for part, errors in zip(parts.parts, alone, strict=True)
    ]
    parts_by_name = {part.name: part for part in parts.parts}

    # The report names parts to keep; rules and switches are about those that are low.
    def others(names: Collection[str]) -> list[PrecisionPart]:
        return [part for name, part in parts_by_name.items() if name not in names]

    return SensitivityReport(
        tuple(sorted(rows, key=lambda row: row.alone.gradients, reverse=True)),
        low_policy,
        high,
        measuring.errors(everything),
        switches.errors(parts.parts),
        measuring.scale,
        measuring.evaluations,
        _rules=lambda names: rules_of(others(names)),
        _estimate=lambda names: switches.errors(others(names)),
        _measure=measuring.errors,
    )


class Measuring:
    """Evaluates a loss under rules, and compares it with a reference.

    Args:
      loss_fn: the loss.
      call: `(args, kwargs)`, of which the first argument is the params.
      has_aux: whether it returns outputs with the loss.
      reference: the rules of the reference.
    """

    def __init__(
        self, loss_fn: Callable[..., Any], call: Any, has_aux: bool, reference: PolicyRules
    ) -> None:
        check_numbers(call, "sensitivity")
        self._loss_fn, self._has_aux = loss_fn, has_aux
        self._static, self._arrays = partition(call)
        self.program = trace_call(loss_fn, self._static, self._arrays).closed
        self._errors: dict[PolicyRules, Errors] = {}
        self.evaluations = 0
        self.scale = 1.0
        self._reference = self._evaluate(self._compiled(reference))
        if not all_finite(self._reference):
            raise ValueError(
                "the loss, the outputs or a gradient are not finite in the reference, so that "
                "nothing can be compared with them. jaxmp.diagnostics.find_overflow names the "
                "operation"
            )
        self._errors[reference] = errors_of(self._reference, self._reference)

    def set_scale(self, rules: PolicyRules, scale: float, *, find: bool) -> None:
        """Sets the loss scale, or finds the largest at which these rules have finite gradients."""
        self.scale = 2.0**16 if find else scale
        # The scale is an argument: one compiled program tries all.
        run = self._compiled(rules)
        while True:
            results = self._evaluate(run)
            gradients = results[2]
            if not find or self.scale == 1 or all_finite(gradients):
                break
            self.scale /= 16
        self._errors[rules] = errors_of(results, self._reference)

    def errors(self, rules: PolicyRules) -> Errors:
        """Returns the errors of the loss under rules; each rules are evaluated once."""
        if rules not in self._errors:
            results = self._evaluate(self._compiled(rules))
            self._errors[rules] = errors_of(results, self._reference)
        return self._errors[rules]

    def gradient_program(self, rules: PolicyRules) -> tuple[Traced, list[Any]]:
        """Returns the program of loss, outputs and gradients under rules, and its arguments."""
        arrays = [jnp.float32(self.scale), *self._arrays]
        static, leaves = partition((tuple(arrays), {}))
        with _quiet():
            return trace_call(self._function(rules), static, leaves), arrays

    def _function(self, rules: PolicyRules) -> Callable[..., Any]:
        def run(scale: Any, *arrays: Any) -> Any:
            args, kwargs = combine(self._static, arrays)
            fun = autocast(self._loss_fn, rules)
            gradient = value_and_grad(fun, has_aux=self._has_aux, loss_scale=scale)
            out, gradients = gradient(*args, **kwargs)
            loss, outputs = out if self._has_aux else (out, ())
            return tuple(widen(split_floats(tree)[0]) for tree in (loss, outputs, gradients))

        return run

    def _compiled(self, rules: PolicyRules) -> Callable[..., Any]:
        return jax.jit(self._function(rules), compiler_options=_AS_WRITTEN)

    def _evaluate(self, run: Callable[..., Any]) -> Any:
        self.evaluations += 1
        with _quiet():
            return run(jnp.float32(self.scale), *self._arrays)


class Switches:
    """The program in which everything is low, with the roundings of parts switched on and off.

    Args:
      measuring: evaluates the loss; counts evaluations.
      rules: rules under which all parts are low.
      parts: the parts.
    """

    def __init__(self, measuring: Measuring, rules: PolicyRules, parts: Parts) -> None:
        traced, self._arrays = measuring.gradient_program(rules)
        # One program for all sets of parts: the switches are its arguments.
        numbers = {part: i for i, part in enumerate(parts.parts)}
        self._numbers, self._measuring = numbers, measuring

        def part_of(names: tuple[str, ...]) -> int | None:
            owner = parts.owner(names)
            return None if owner is None else numbers[owner]

        @jax.jit
        def run(*arrays: Any) -> Any:
            def on_axes(flags: Any, *arrays: Any) -> list[Any]:
                return switched(traced.closed, arrays, flags, part_of)

            return combine(traced.returned, traced.axes.run(on_axes, arrays))

        self._run = run
        # The same program without roundings: the reference is another one, whose errors in float32
        # are its own.
        self._without_roundings = self._evaluate(())
        self._errors: dict[frozenset[PrecisionPart], Errors] = {}

    def errors(self, low: Collection[PrecisionPart]) -> Errors:
        """Returns the errors with the roundings of some parts; relative to those of none."""
        key = frozenset(low)
        if key not in self._errors:
            self._errors[key] = errors_of(self._evaluate(key), self._without_roundings)
        return self._errors[key]

    def _evaluate(self, low: Collection[PrecisionPart]) -> Any:
        self._measuring.evaluations += 1
        flags = jnp.array([part in low for part in self._numbers])
        return self._run(flags, *self._arrays)


def errors_of(results: Any, reference: Any) -> Errors:
    """Returns the errors of loss, outputs and gradients."""
    loss, outputs, gradients = (float(x) for x in _relative_errors(results, reference))
    return Errors(loss, outputs if reference[1] else None, gradients)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # The rules are ours: what autocast warns of them, the user did not write.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@jax.jit
def _relative_errors(results: Any, reference: Any) -> list[Any]:
    return [relative_error(*pair) for pair in zip(results, reference, strict=True)]


def relative_error(arrays: Sequence[Any], reference: Sequence[Any]) -> Any:
    """Returns the norm of a difference divided by that of the reference, over all arrays together.

    Args:
      arrays: arrays.
      reference: arrays like them, finite.

    Returns:
      A number: infinite if `arrays` are not finite, or differ from a reference of zeros.
    """
    if not reference:
        return jnp.zeros(())
    # Divided by the largest number: squares of float32 would leave its range.
    largest = jnp.max(jnp.stack([jnp.max(jnp.abs(x), initial=0) for x in reference]))
    unit = jnp.where(largest > 0, largest, 1)
    size = sum(jnp.sum(jnp.abs(x / unit) ** 2) for x in reference)
    pairs = zip(arrays, reference, strict=True)
    off = sum(jnp.sum(jnp.abs((x - y) / unit) ** 2) for x, y in pairs)
    # Of two trees of zeros the quotient is NaN, and the error 0.
    error = jnp.sqrt(off / size)
    return jnp.where(off == 0, 0.0, jnp.where(jnp.isfinite(error), error, jnp.inf))
