"""The report of `sensitivity`: the errors of loss, outputs and gradients, by part."""

import dataclasses
import math
import numbers
from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple

from jaxmp._policies.policy import Policy, short_name
from jaxmp._policies.policy_rules import PolicyRules
from jaxmp._tools.inspect.table_report import TableReport

Of = Literal["loss", "outputs", "gradients"]
OF = ("loss", "outputs", "gradients")


class Errors(NamedTuple):
    """How far a program is from the reference, relative to it; infinite if it is not finite.

    Attributes:
      loss: the difference of the losses, divided by the size of the reference's.
      outputs: the norm of the difference of the other results of the function, divided by the norm
        of the reference's; None without such outputs.
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


@dataclasses.dataclass(frozen=True)
class PartSensitivity:
    """How sensitive one part of a program is.

    Attributes:
      path: the scope, or the pattern that was given.
      alone: the errors that the roundings of this part alone make.
      flops: the share of this part in the FLOPs of the forward pass.
    """

    path: str
    alone: Errors
    flops: float


@dataclasses.dataclass(frozen=True)
class SensitivityReport(TableReport):
    """The sensitivity of each part of a program, the most sensitive first. Prints as a table.

    It holds the function and its arguments, to measure the rules that it gives.

    Attributes:
      rows: one for each part, those with the largest error of gradients first.
      low: the policy that was tried.
      reference: the policy that errors are relative to.
      all_low: the errors of the program in which all parts are low.
      all_switched: the same with all roundings switched on in float32, as the rows were measured.
        It differs where arithmetic in 16 bits is more than arithmetic in float32 and a rounding.
      loss_scale: the loss scale that was used.
      evaluations: how many evaluations of loss and gradients the table took.
    """

    rows: tuple[PartSensitivity, ...]
    low: Policy
    reference: Policy
    all_low: Errors
    all_switched: Errors
    loss_scale: float
    evaluations: int
    _rules: Callable[[Collection[str]], PolicyRules] = dataclasses.field(repr=False, compare=False)
    _estimate: Callable[[Collection[str]], Errors] = dataclasses.field(repr=False, compare=False)
    _measure: Callable[[PolicyRules], Errors] = dataclasses.field(repr=False, compare=False)

    def errors(self, rules: PolicyRules) -> Errors:
        """Measures the program under any rules: one evaluation, compiled for them.

        Args:
          rules: rules, as for `jaxmp.autocast`.

        Returns:
          Its errors, relative to the reference.
        """
        return self._measure(rules)

    def keep(self, count: int, of: Of = "gradients") -> PolicyRules:
        """Returns rules that keep the most sensitive parts as they are, and lower the others.

        Args:
          count: how many parts to keep.
          of: whose error says which are the most sensitive.

        Returns:
          Rules for `jaxmp.autocast`.

        Raises:
          ValueError: for a count below 0 or above the number of parts.
        """
        if isinstance(count, bool) or count not in range(len(self.rows) + 1):
            raise ValueError(f"count must be from 0 to {len(self.rows)}, got {count!r}")
        return self._rules(self._first(count, of))

    def rules(self, target: float | int = 0.01, of: Of = "gradients") -> PolicyRules:
        """Returns rules that reach a target, and keep as few parts as the order of them allows.

        How many are needed is estimated by switches, and then measured: the program under these
        rules has met the target, for the batch of the report. That takes one more compilation, and
        more where the estimate was not enough.

        Args:
          target: the largest relative error, 0.01 for one percent.
          of: the error: of the `"loss"`, the `"outputs"`, or the `"gradients"`.

        Returns:
          Rules for `jaxmp.autocast`.

        Raises:
          ValueError: for a target that is not positive, or that no rules reach.
        """
        if not (isinstance(target, numbers.Real) and target > 0):
            raise ValueError(f"target must be a positive relative error, got {target!r}")
        _check_of(of)
        # The program in which everything is low meets the target: no part has to be kept.
        if self.all_low.of(of) <= target:
            return self.keep(0, of)

        # How many parts are needed is estimated by switches, and then measured under rules.
        def estimated(count: int) -> bool:
            return self._estimate(self._first(count, of)).of(of) <= target

        def measured(count: int) -> bool:
            return self._measure(self.keep(count, of)).of(of) <= target

        # An estimate runs a compiled program; rules have to be compiled before they are measured.
        total = len(self.rows)
        count = _least_count(estimated, 0, total)
        if measured(count):
            return self.keep(count, of)
        if count == total or not measured(total):
            raise ValueError(
                f"with all {total} parts kept, the error of {of} is still above {target:g}: "
                "what is low lies outside of them. Name more parts, or leave candidates out"
            )
        return self.keep(_least_count(measured, count, total), of)

    def _first(self, count: int, of: Of) -> list[str]:
        _check_of(of)
        ordered = sorted(self.rows, key=lambda row: row.alone.of(of), reverse=True)
        return [row.path for row in ordered[:count]]

    def as_dict(self) -> dict[str, Any]:
        """Returns plain numbers and text, as json.dumps takes them; None for infinities and NaN."""
        return {
            "low": short_name(self.low),
            "reference": short_name(self.reference),
            "all_low": _plain(self.all_low),
            "all_switched": _plain(self.all_switched),
            "loss_scale": self.loss_scale,
            "evaluations": self.evaluations,
            "parts": [
                {"path": row.path, "alone": _plain(row.alone), "flops": row.flops}
                for row in self.rows
            ],
        }

    def __rich__(self) -> Any:
        from rich.table import Table

        names = [name for name, error in zip(OF, self.all_low, strict=True) if error is not None]
        caption = (
            f"errors relative to {short_name(self.reference)} from the roundings of one part in "
            f"{short_name(self.low)}; {self.evaluations} evaluations"
        )
        table = Table(caption=caption, caption_justify="left")
        table.add_column("part", overflow="fold")
        for name in [*names, "FLOPs"]:
            table.add_column(name, justify="right")
        for row in self.rows:
            cells = [_in_percent(getattr(row.alone, name)) for name in names]
            table.add_row(row.path, *cells, f"{row.flops:.0%}" if row.flops else "")
        table.add_section()
        cells = [_in_percent(getattr(self.all_switched, name)) for name in names]
        table.add_row("all of them", *cells, "")
        cells = [_in_percent(getattr(self.all_low, name)) for name in names]
        table.add_row("all low, measured", *cells, "")
        return table


def _least_count(holds: Callable[[int], bool], fails: int, meets: int) -> int:
    """Returns a count at which a condition holds, between one where it fails and one where not."""
    # The error need not fall with each part that is kept: the condition holds at the count that is
    # returned, which need not be the least.
    while meets - fails > 1:
        middle = (fails + meets) // 2
        fails, meets = (fails, middle) if holds(middle) else (middle, meets)
    return meets


def _check_of(of: str) -> None:
    if of not in OF:
        raise ValueError(f"of must be 'loss', 'outputs' or 'gradients', got {of!r}")


def _plain(errors: Errors) -> dict[str, float | None]:
    finite = (None if e is None or not math.isfinite(e) else e for e in errors)
    return dict(zip(OF, finite, strict=True))


def _in_percent(error: float | None) -> str:
    if not error:
        return ""
    return f"{100 * error:.2g} %" if math.isfinite(error) else "not finite"
