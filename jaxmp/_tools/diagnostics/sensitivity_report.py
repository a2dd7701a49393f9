"""The report of `sensitivity`: the errors of loss, outputs and gradients, by part."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from jaxmp._policies.policy import Policy, short_name
from jaxmp._policies.policy_rules import PolicyRules
from jaxmp._tools.diagnostics.first_order import ErrorBar
from jaxmp._tools.inspect.table_report import TableReport, plain

Of = Literal["loss", "outputs", "gradients"]
OF = ("loss", "outputs", "gradients")
# A loss is within two standard deviations in 95 % of cases. Norms of many errors scatter less:
# those of gradients were predicted to a quarter.
_MARGINS = {"loss": 2.0, "outputs": 1.25, "gradients": 1.25}
# A part without products costs memory traffic in float32: about that of a thousandth of the FLOPs.
_LEAST_COST = 0.001
_MOST_OPERATIONS = 8


class Errors(NamedTuple):
    """How far a program is from the reference, relative to it; infinite if it overflows.

    Attributes:
      loss: the difference of the losses, divided by the size of the loss.
      outputs: the norm of the difference of the other results of the function, divided by their
        norm; None without such outputs.
      gradients: the same of all gradients together.
    """

    loss: float
    outputs: float | None
    gradients: float

    def of(self, what: Of) -> float:
        """Returns one of them."""
        error = getattr(self, what)
        if error is None:
            raise ValueError(
                "there are no outputs: loss_fn returns a loss alone. Have it return (loss, "
                "outputs) and say has_aux=True, or choose of='loss' or of='gradients'"
            )
        return float(error)


class Variances(NamedTuple):
    """Squared errors of independent roundings, relative to the results; they add up.

    Attributes:
      loss: of the loss.
      outputs: of the other results; None without such outputs.
      gradients: of the gradients, without jumps.
      jumps: of the gradients, by comparisons that come out otherwise, if all parts round.
    """

    loss: float
    outputs: float | None
    gradients: float
    jumps: float

    def errors(self, jumps: float) -> Errors:
        """Returns the errors that these roundings make alone.

        Args:
          jumps: `jumps` of all roundings of the program. Errors half as large let half as many
            comparisons come out otherwise: the square of what jumps make grows with their size.
        """
        gradients = self.gradients + (math.sqrt(self.jumps * jumps) if self.jumps else 0.0)
        outputs = None if self.outputs is None else math.sqrt(self.outputs)
        return Errors(math.sqrt(self.loss), outputs, math.sqrt(gradients))


def total(variances: Iterable[Variances]) -> Variances:
    """Returns the variances of several sets of roundings together."""
    loss, outputs, gradients, jumps = zip(*variances, strict=True)
    return Variances(
        sum(loss), None if None in outputs else sum(outputs), sum(gradients), sum(jumps)
    )


@dataclasses.dataclass(frozen=True)
class PartSensitivity:
    """How sensitive one part of a program is.

    Attributes:
      path: the scope, or the pattern that was given.
      alone: the errors that the roundings of this part alone are predicted to make: one standard
        deviation.
      flops: the share of this part in the FLOPs of the forward pass.
      in_dtypes: the same as `alone` if they rounded to another dtype, by its name.
    """

    path: str
    alone: Errors
    flops: float
    in_dtypes: Mapping[str, Errors]


@dataclasses.dataclass(frozen=True)
class OperationSensitivity:
    """The errors of one operation of the code.

    Attributes:
      path: its module.
      line: its line, as `"net.py:12 (block)"`.
      operation: its name in JAX.
      direction: `"forward"`, `"backward"` or `"recomputed"`.
      alone: the errors that its roundings alone are predicted to make.
    """

    path: str
    line: str
    operation: str
    direction: str
    alone: Errors


@dataclasses.dataclass(frozen=True)
class SensitivityReport(TableReport):
    """The sensitivity of each part of a program, the most sensitive first. Prints as a table.

    It holds the function and its arguments, to measure the rules that it gives.

    Attributes:
      rows: one for each part, those with the largest error of gradients first.
      operations: one for each operation of the code, likewise.
      low: the rules that were tried.
      reference: the policy that errors are relative to.
      loss: the loss under these rules, and its error bar.
      all_low: the errors that the low program is predicted to make.
      measured: those that it makes, with `confirm=True`.
      uncounted: operations whose effect no derivative says, such as `top_k`.
      loss_scale: the loss scale that was used.
    """

    rows: tuple[PartSensitivity, ...]
    operations: tuple[OperationSensitivity, ...]
    low: PolicyRules
    reference: Policy
    loss: ErrorBar
    all_low: Errors
    measured: Errors | None
    uncounted: tuple[str, ...]
    loss_scale: float
    # The variances that vanish if all parts of a set are kept.
    _by_parts: Mapping[frozenset[str], Variances] = dataclasses.field(repr=False, compare=False)
    _rules: Callable[[Collection[str]], PolicyRules] = dataclasses.field(repr=False, compare=False)
    _measure: Callable[[PolicyRules], Errors] = dataclasses.field(repr=False, compare=False)

    def errors(self, rules: PolicyRules) -> Errors:
        """Measures the program under any rules: one evaluation, compiled for them.

        Args:
          rules: rules, as for `jaxmp.autocast`.

        Returns:
          Its errors, relative to the reference.
        """
        return self._measure(rules)

    def rules_for(self, target: float | int = 0.01, of: Of = "gradients") -> PolicyRules:
        """Returns rules that reach a target, and keep the parts that cost least.

        The parts that remove most of the squared error for their FLOPs are kept, until the
        prediction meets the target with a margin: of two standard deviations for the loss, and of a
        quarter for the others, which scatter less. With `confirm=True` the rules are measured, and
        keep more where they have to.

        Args:
          target: the largest relative error, 0.01 for one percent.
          of: the error: of the `"loss"`, the `"outputs"`, or the `"gradients"`.

        Returns:
          Rules for `jaxmp.autocast`.

        Raises:
          ValueError: for a target that is not positive, or, with `confirm=True`, that no rules
            reach.
        """
        is_number = isinstance(target, numbers.Real) and not isinstance(target, bool)
        if not (is_number and 0 < target < math.inf):
            raise ValueError(f"target must be a positive relative error, got {target!r}")
        if of not in OF:
            raise ValueError(f"of must be 'loss', 'outputs' or 'gradients', got {of!r}")
        aim, paths = float(target), frozenset(row.path for row in self.rows)
        kept = self._cheapest(aim, of)
        while (
            self.measured is not None and (error := self.errors(self._rules(kept)).of(of)) > target
        ):
            if kept == paths:
                raise ValueError(
                    f"with all {len(kept)} parts kept, the error of {of} is still above "
                    f"{target:g}: what is low lies outside of them. Name more parts, or leave "
                    "candidates out"
                )
            # The prediction was too small by this factor. If it has nothing left, no part is known
            # to make the error: all are kept.
            left = self._predicted(kept, of)
            aim = min(aim * target / error, left * 0.99)
            kept = self._cheapest(aim, of) if aim else paths
        return self._rules(kept)

    def _predicted(self, kept: Collection[str], of: Of) -> float:
        """Returns the error that is left with these parts kept, and a margin."""
        left = [x for parts, x in self._by_parts.items() if not parts <= set(kept)]
        return _MARGINS[of] * total(left).errors(self._jumps).of(of) if left else 0.0

    @property
    def _jumps(self) -> float:
        return sum(variances.jumps for variances in self._by_parts.values())

    def _cheapest(self, aim: float, of: Of) -> frozenset[str]:
        """Returns parts to keep so that the predicted error is no larger than an aim."""
        costs = {row.path: row.flops + _LEAST_COST for row in self.rows}
        squares = {x: v.errors(self._jumps).of(of) ** 2 for x, v in self._by_parts.items()}
        kept: frozenset[str] = frozenset()

        # A rounding that several parts share vanishes with the last of them: sets are tried.
        def worth(parts: frozenset[str]) -> float:
            removed = sum(square for each, square in squares.items() if each <= kept | parts)
            return removed / sum(costs[name] for name in parts - kept)

        while self._predicted(kept, of) > aim:
            others = [parts for parts in squares if not parts <= kept]
            kept |= max(zip(map(worth, others), others, strict=True), key=lambda pair: pair[0])[1]
        # What later sets made superfluous, the most expensive first.
        for name in sorted(kept, key=lambda name: costs[name], reverse=True):
            if self._predicted(kept - {name}, of) <= aim:
                kept -= {name}
        return kept

    def as_dict(self) -> dict[str, Any]:
        """Returns plain numbers and text, as json.dumps takes them; None for infinities and NaN."""
        return {
            "low": _name(self.low),
            "reference": short_name(self.reference),
            "loss": plain(self.loss),
            "all_low": plain(self.all_low),
            "measured": self.measured and plain(self.measured),
            "loss_scale": self.loss_scale,
            "uncounted": list(self.uncounted),
            "parts": [
                {
                    "path": row.path,
                    "alone": plain(row.alone),
                    "in_dtypes": {name: plain(errors) for name, errors in row.in_dtypes.items()},
                    "flops": row.flops,
                }
                for row in self.rows
            ],
            "operations": [vars(row) | {"alone": plain(row.alone)} for row in self.operations],
        }

    def __rich__(self) -> Any:
        from rich.console import Group

        from jaxmp._tools.inspect.tables import Section, bullets, drawn

        names = [name for name, error in zip(OF, self.all_low, strict=True) if error is not None]

        def cells(errors: Errors | None) -> tuple[str, ...]:
            return tuple(_in_percent(getattr(errors, name, None)) for name in names)

        # Of other dtypes and of measurements, the gradients alone: the loss has one number.
        dtypes = list(self.rows[0].in_dtypes)
        rows = [
            (
                row.path,
                *cells(row.alone),
                *(_in_percent(row.in_dtypes[name].gradients) for name in dtypes),
                f"{row.flops:.0%}" if row.flops else "",
            )
            for row in self.rows
        ]
        empty = [""] * len(dtypes)
        rows.append(("all of them", *cells(self.all_low), *empty, ""))
        if self.measured is not None:
            rows.append(("all of them, measured", *cells(self.measured), *empty, ""))
        columns = ["part", *(f">{name}" for name in names), *(f">in {name}" for name in dtypes)]
        operations = [
            (
                row.line,
                row.operation,
                ", ".join(filter(None, (row.path, row.direction))),
                *cells(row.alone),
            )
            for row in self.operations
        ]
        sentences = [f"{_name(self.low)} moves the loss of {self.loss}."]
        if self.uncounted:
            sentences.append(f"Not counted: {', '.join(self.uncounted)}.")
        title, columns = "Errors from the roundings of one part", [*columns, ">FLOPs"]
        places = ["line", "operation", "module, pass", *(f">{name}" for name in names)]
        return Group(
            drawn(Section(title, columns, rows, len(rows))),
            drawn(Section("Operations", places, operations, _MOST_OPERATIONS)),
            bullets(sentences),
        )


def _name(rules: PolicyRules) -> str:
    is_one = not rules.rules and rules.default is not None
    return str(rules).removeprefix("(default)").strip() if is_one else "the rules"


def _in_percent(error: float | None) -> str:
    if not error:
        return ""
    return f"{100 * error:.2g} %" if math.isfinite(error) else "not finite"
