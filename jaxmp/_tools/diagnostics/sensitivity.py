"""Says which part of a program needs more bits, from one backward pass through its roundings."""

import contextlib
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jmp
from jaxtyping import PyTree

from jaxmp._autocast.api import autocast
from jaxmp._numerics.tree import split_floats, widen
from jaxmp._policies.patterns import Pattern
from jaxmp._policies.policy import get_policy
from jaxmp._policies.policy_rules import PolicyRules
from jaxmp._program.tracing import Traced, combine, partition, trace_call
from jaxmp._tools.diagnostics.first_order import AS_WRITTEN
from jaxmp._tools.diagnostics.inputs import check_numbers, number_of_scale
from jaxmp._tools.diagnostics.precision_parts import precision_parts_of
from jaxmp._tools.diagnostics.prediction import Prediction, relative_errors
from jaxmp._tools.diagnostics.sensitivity_report import Errors, PartSensitivity, SensitivityReport
from jaxmp._training.gradient_options import LossScaleLike
from jaxmp._training.gradients import value_and_grad


def sensitivity(
    loss_fn: Callable[..., Any],
    params: PyTree,
    *args: Any,
    low: str | jmp.Policy | PolicyRules = "mixed_bfloat16",
    candidates: Iterable[Pattern] | None = None,
    reference: str | jmp.Policy = "float32",
    loss_scale: LossScaleLike = None,
    has_aux: bool = False,
    confirm: bool = False,
    **kwargs: Any,
) -> SensitivityReport:
    """Predicts which parts of a program need more bits, and gives rules that keep these.

    The low program runs in float32, with its roundings. A backward pass says what each rounding
    does to the loss, to first order; another one what it does to the gradients, and to the outputs.
    Errors of roundings add up like those of independent numbers. To find a loss scale, the compiled
    program runs once more for each that is tried.

    A part of a program is a linen module or a `jax.named_scope`, with all layers of a scan as one.
    Operations outside of scopes are a part too.

    Args:
      loss_fn: `loss_fn(params, *args, **kwargs)`, as given to `make_train_step`, without a policy
        of its own. It is put under `jaxmp.autocast`.
      params: the params, or a live nnx model.
      *args: the batch, and other arguments.
      low: the policy to try, such as `"mixed_bfloat16"`, `"mixed_float16"`, `"mixed_float8"`; or
        rules.
      candidates: the patterns of the parts to try, as in `PolicyRules`: each is one part. Other
        scopes stay in the precision of the reference. None tries every scope.
      reference: the policy of the parts that are kept, and of the program that is compared with.
      loss_scale: the loss scale: a number, or `state.loss_scale`. None takes the largest up to
        2**16, in steps of 16, at which no more overflows in float16 than without a scale.
      has_aux: whether `loss_fn` returns `(loss, outputs)`.
      confirm: whether to measure too: the program under `low`, and the rules that the report
        gives. Each is compiled and runs once, and so does the reference.
      **kwargs: further arguments of `loss_fn`.

    Returns:
      The report: `report.rows`, `report.operations`, `report.loss`, `report.rules_for(0.01)`,
      `print(report)`.

    Raises:
      ValueError: if nothing in the program has a name, a pattern matches nothing, the loss is not
        finite, or an option is wrong.
      TypeError: for arrays without numbers, as under `jit`, or if `candidates` is one pattern.

    >>> def loss_fn(params, x):
    ...     with jax.named_scope("wide"):
    ...         h = x @ params["wide"] - 1000.0
    ...     with jax.named_scope("out"):
    ...         return jnp.mean((h @ params["out"]) ** 2)
    >>> params = {"wide": jnp.full((8, 8), 125.01), "out": jnp.eye(8)}
    >>> report = sensitivity(loss_fn, params, jnp.ones((4, 8)))
    >>> report.rows[0].path
    'wide'
    >>> print(report.rules_for(target=0.05))
    /wide      float32
    (default)  mixed_bfloat16
    """
    scale = None if loss_scale is None else number_of_scale(loss_scale)
    nnx = sys.modules.get("flax.nnx")  # without Flax there are no nnx modules
    if nnx is not None and isinstance(params, nnx.Module):
        from jaxmp._flax.nnx_scopes import with_plain_params

        loss_fn, params = with_plain_params(loss_fn, params)
    rules = low if isinstance(low, PolicyRules) else PolicyRules(default=get_policy(low))
    high = get_policy(reference)
    measuring = LossUnderRules(
        loss_fn, ((params, *args), kwargs), has_aux, PolicyRules(default=high)
    )
    parts = precision_parts_of(measuring.program, candidates)
    everything = parts.rules((), rules, high)
    measuring.scale = scale or 1.0
    program = measuring.gradient_program(everything)
    prediction = Prediction(*program, everything, parts, find_scale=scale is None)
    measuring.scale = prediction.scale
    flops = sum(part.flops for part in parts.parts) or 1

    def rules_of(kept: Collection[str]) -> PolicyRules:
        return parts.rules([part for part in parts.parts if part.name in kept], rules, high)

    rows = [
        PartSensitivity(
            part.name,
            prediction.errors_of(part.name),
            part.flops / flops,
            {name: prediction.errors_of(part.name, name) for name in prediction.dtypes},
        )
        for part in parts.parts
    ]
    return SensitivityReport(
        tuple(sorted(rows, key=lambda row: row.alone.gradients, reverse=True)),
        prediction.operations(),
        rules,
        high,
        prediction.loss,
        prediction.errors_of(),
        measuring.errors(everything) if confirm else None,
        prediction.uncounted,
        measuring.scale,
        prediction.by_parts(),
        _rules=rules_of,
        _measure=measuring.errors,
    )


class LossUnderRules:
    """Evaluates a loss under rules, and compares it with a reference.

    Attributes:
      program: the loss without rules.
      scale: the loss scale.
    """

    def __init__(
        self, loss_fn: Callable[..., Any], call: Any, has_aux: bool, reference: PolicyRules
    ) -> None:
        check_numbers(call, "sensitivity")
        self._loss_fn, self._has_aux = loss_fn, has_aux
        self._static, self._arrays = partition(call)
        self.program = trace_call(loss_fn, self._static, self._arrays).closed
        self.scale = 1.0
        self._reference = reference
        self._results: dict[PolicyRules, Any] = {}

    def errors(self, rules: PolicyRules) -> Errors:
        """Returns the errors of the loss under rules; each rules are evaluated once."""
        for each in (self._reference, rules):
            if each not in self._results:
                run = jax.jit(self._function(each), compiler_options=AS_WRITTEN)
                with _quiet():
                    self._results[each] = run(jnp.float32(self.scale), *self._arrays)
        return relative_errors(self._results[rules], self._results[self._reference])

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


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # The rules are ours: what autocast warns of them, the user did not write.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
