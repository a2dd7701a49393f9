"""Finds the parts of a program that can have a precision of their own, and writes their rules."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jax.extend import core

from jaxmp._autocast.regions import Regions, region_of
from jaxmp._numerics.dtypes import is_inexact, is_narrow
from jaxmp._numerics.user_warnings import first_few, warn
from jaxmp._policies.patterns import check_pattern, is_about_paths, matches, pattern_text
from jaxmp._policies.policy import Policy
from jaxmp._policies.policy_rules import PolicyRules
from jaxmp._policies.presets import family_left_out
from jaxmp._program.op_classes import CASTS, CONTRACTIONS, IDENTITIES, WIDENED
from jaxmp._program.scopes import names_in
from jaxmp._tools.inspect.equations import all_sites, walk
from jaxmp._tools.inspect.lines import scopes_of

OUTSIDE = "(outside of all scopes)"
NO_SCOPES = (
    "nothing in this program has a name, so that rules could not tell its parts apart. Name them: "
    "linen modules have names; write jax.named_scope around parts of plain JAX; for nnx, give the "
    "live model as params, or split jaxmp.nnx.with_scopes(model); for Equinox, take the params of "
    "jaxmp.equinox.with_scopes(model). A policy that the model already has hides its parts: "
    "take it off"
)


@dataclasses.dataclass(frozen=True)
class PrecisionPart:
    """A part of a program to which rules can give a precision.

    Attributes:
      name: the path of a scope, or the pattern that the user gave.
      pattern: the pattern of its rule; None outside of all scopes, where the default holds.
      flops: the FLOPs of its products.
    """

    name: str
    pattern: Any
    flops: int


@dataclasses.dataclass(frozen=True)
class Parts:
    """The parts of a program, and what belongs to each.

    Attributes:
      parts: the parts.
      owners: the part that each scope with operations belongs to, by the names of the scope as
        autocast knows them; None where no part has it.
    """

    parts: tuple[PrecisionPart, ...]
    owners: Mapping[tuple[str, ...], PrecisionPart | None]

    def owner(self, names: tuple[str, ...]) -> PrecisionPart | None:
        """Returns the part of an operation, which may be in a scope without operations of its own.

        Gradients are added up, and casts are, in the scopes around those that compute.
        """
        # jaxmp's own marks are scopes too, and no pattern matches them.
        names = tuple(name for name in names if not name.startswith("jaxmp."))
        for end in range(len(names), -1, -1):
            if names[:end] in self.owners:
                return self.owners[names[:end]]
        return None

    def rules(
        self, high: Collection[PrecisionPart], low: PolicyRules, policy: Policy
    ) -> PolicyRules:
        """Returns rules under which these parts have a policy, and all others that of `low`."""
        policies: dict[PrecisionPart, Policy] = dict.fromkeys(self.parts, policy)
        for names, owner in self.owners.items():
            if owner is not None and owner not in high:
                decisions = map(low.decide, _paths(names))
                own = next((x.policy for x in decisions if x.rule is not None), low.default)
                policies[owner] = policy if own is None else own
        # Heads and their like stay out of float8, as by default.
        for part in self.parts:
            if policies[part].products is not None and family_left_out(part.name):
                policies[part] = policies[part].with_products(None)
        outside = [policies[part] for part in self.parts if part.pattern is None]
        default = outside[0] if outside else policy
        # Nothing in this program follows the default: rules read as the low policy with exceptions.
        if not outside and None not in self.owners.values() and len(high) < len(self.parts):
            default = low.default or policy
        scopes = [part for part in self.parts if part.pattern is not None]
        ruled = {part for part in scopes if policies[part] != default}

        def rules_of_parts() -> PolicyRules:
            pairs = [(part.pattern, policies[part]) for part in scopes if part in ruled]
            return PolicyRules(pairs, default)

        # Parts with the default's policy inside of parts with another one need rules too.
        regions = Regions(rules_of_parts())
        for names, owner in self.owners.items():
            if owner is not None:
                region, target = regions.of(names), region_of(policies[owner])
                fields = ("low", "products", "precision")
                if any(getattr(region, x) != getattr(target, x) for x in fields):
                    ruled.add(owner)
        return rules_of_parts()


def precision_parts_of(closed: Any, patterns: Iterable[Any] | None) -> Parts:
    """Returns the parts of a program.

    Args:
      closed: its jaxpr, as autocast traces it.
      patterns: the patterns of the parts; None for a part for each scope that computes.

    Raises:
      ValueError: for no pattern, or one that matches no scope of the program or can match none.
      TypeError: for one pattern in place of a list.
    """
    if isinstance(patterns, str):
        raise TypeError(f"candidates must be a list of patterns, got {patterns!r}: [{patterns!r}]")
    flops: dict[tuple[str, ...], int] = {}
    narrow: dict[str, None] = {}
    for site in all_sites(walk(closed)):
        names = names_in(scopes_of(site))
        # Products that are low already are in the reference too: the report cannot speak of them.
        if site.name in CONTRACTIONS and any(is_narrow(aval.dtype) for aval in site.in_avals):
            narrow["/".join(names) or OUTSIDE] = None
        # A scope is a part if an operation in it may round: it computes floats from floats, and
        # does not only move them.
        is_move = site.bodies or site.name in IDENTITIES | WIDENED | CASTS
        operands = [x.aval for x in site.equation.invars if not isinstance(x, core.Literal)]
        is_ours = any(name.startswith("jaxmp.") for name in names)
        if is_move or is_ours or not any(map(is_inexact, site.out_avals)):
            continue
        if any(map(is_inexact, operands)):
            flops[names] = flops.get(names, 0) + site.flops * site.runs
    if narrow:
        warn(
            f"loss_fn has products in 16 bits or fewer without a policy of sensitivity, in "
            f"{first_few(list(narrow))}. They are in the reference too, and rules cannot change "
            "them: give params and inputs in float32, and take other policies off"
        )
    if patterns is None:
        parts = {
            names: PrecisionPart(
                "/".join(names) or OUTSIDE, _exactly(names) if names else None, count
            )
            for names, count in flops.items()
        }
        if all(part.pattern is None for part in parts.values()):
            raise ValueError(NO_SCOPES)
        return Parts(tuple(parts.values()), parts)
    parts_of_patterns = tuple(_part_of_pattern(pattern, flops) for pattern in patterns)
    if not parts_of_patterns:
        raise ValueError("candidates has no pattern. Give one or more, or None to try every scope")
    rules = PolicyRules([(part.pattern, None) for part in parts_of_patterns])
    owners: dict[tuple[str, ...], PrecisionPart | None] = {}
    for names in flops:
        # The innermost scope that a pattern matches decides, as under autocast.
        decisions = (rules.decide(path).rule for path in _paths(names))
        number = next((rule for rule in decisions if rule is not None), None)
        owners[names] = None if number is None else parts_of_patterns[number]
    return Parts(parts_of_patterns, owners)


def _paths(names: tuple[str, ...]) -> list[str]:
    # Of a scope and those around it, innermost first, with and without the name of the model: in
    # the order in which autocast tries them.
    ends = range(len(names), 0, -1)
    return ["/".join(names[start:end]) for end in ends for start in (0, 1) if start < end]


def _exactly(names: Sequence[str]) -> str:
    """Returns the pattern that matches one path alone.

    >>> _exactly(("LM", "blocks[0]"))
    '/LM/blocks[[]0]'
    """
    # Brackets: patterns have no other way to quote "blocks[0]".
    quoted = ("".join(f"[{c}]" if c in "*?[" else c for c in name) for name in names)
    return "/" + "/".join(quoted)


def _part_of_pattern(pattern: Any, flops: dict[tuple[str, ...], int]) -> PrecisionPart:
    pattern = check_pattern(pattern)
    text = pattern_text(pattern)
    if not is_about_paths(pattern):
        raise ValueError(
            f"autocast knows the names of modules, not the modules: {text!r} can match nothing. "
            "Use a pattern of names, as in '*/attention'"
        )
    scopes = [names for names in flops if any(matches(pattern, p, None) for p in _paths(names))]
    if not scopes:
        paths = sorted("/".join(names) for names in flops if names)
        raise ValueError(
            f"{text!r} matches no scope of this program. Its scopes are "
            f"{', '.join(map(repr, paths[:8]))}{', ...' if len(paths) > 8 else ''}"
            if paths
            else NO_SCOPES
        )
    return PrecisionPart(text, pattern, sum(flops[names] for names in scopes))
