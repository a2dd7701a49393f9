"""Finds the parts of a program that can have a precision of their own, and writes their rules."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from jax.extend import core

from jaxmp._autocast.regions import Region, Regions, region_of
from jaxmp._numerics.dtypes import is_inexact, is_narrow
from jaxmp._numerics.user_warnings import first_few, warn
from jaxmp._policies.patterns import check_pattern, is_about_paths, matches, pattern_text
from jaxmp._policies.policy import Policy
from jaxmp._policies.policy_rules import PolicyRules
from jaxmp._policies.presets import family_left_out
from jaxmp._program.op_classes import CASTS, CONTRACTIONS, IDENTITIES, WIDENED
from jaxmp._program.scopes import names_in
from jaxmp._tools.inspect.equations import Site, all_sites, walk
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
      pattern: the pattern of its rule; None for what is outside of all scopes, which follows the
        default.
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
        names = tuple(name for name in names if not name.startswith("jaxmp."))
        for end in range(len(names), -1, -1):
            if names[:end] in self.owners:
                return self.owners[names[:end]]
        return None

    def rules(self, low: Collection[PrecisionPart], policy: Policy, kept: Policy) -> PolicyRules:
        """Returns rules under which these parts compute low, and everything else does not."""
        chosen = {part: _for_part(part, policy) if part in low else kept for part in self.parts}
        outside = [chosen[part] for part in self.parts if part.pattern is None]
        default = outside[0] if outside else kept
        if not outside and None not in self.owners.values():
            default = policy if low else kept  # nothing in this program follows it
        named = [part for part in self.parts if part.pattern is not None]
        needed = {part for part in named if chosen[part] != default}
        # Rules are needed too for parts of the default inside of parts that have another policy.
        made = self._written(named, needed, chosen, default)
        regions = Regions(made)
        for names, owner in self.owners.items():
            wanted = region_of(kept if owner is None else chosen[owner])
            if owner is not None and _decides_otherwise(regions.of(names), wanted):
                needed.add(owner)
        return self._written(named, needed, chosen, default)

    def _written(
        self,
        named: list[PrecisionPart],
        needed: set[PrecisionPart],
        chosen: dict[PrecisionPart, Policy],
        default: Policy,
    ) -> PolicyRules:
        pairs = [(part.pattern, chosen[part]) for part in named if part in needed]
        return PolicyRules(pairs, default)


def _for_part(part: PrecisionPart, policy: Policy) -> Policy:
    """Returns the policy of a part; heads and their like stay out of float8, as by default."""
    left_out = policy.products is not None and family_left_out(part.name)
    return policy.with_products(None) if left_out else policy


def _decides_otherwise(region: Region, wanted: Region) -> bool:
    one, other = ((each.low, each.products, each.precision) for each in (region, wanted))
    return one != other


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
    already: dict[str, None] = {}
    for site in all_sites(walk(closed)):
        names = names_in(scopes_of(site))
        if site.name in CONTRACTIONS and any(is_narrow(aval.dtype) for aval in site.in_avals):
            already["/".join(names) or OUTSIDE] = None
        if not any(name.startswith("jaxmp.") for name in names) and _computes(site):
            flops[names] = flops.get(names, 0) + site.flops * site.runs
    if already:
        warn(
            f"loss_fn has products in 16 bits or fewer without a policy of sensitivity, in "
            f"{first_few(list(already))}. They are in the reference too, and rules cannot change "
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
    checked = tuple(_part_of_pattern(pattern, flops) for pattern in patterns)
    if not checked:
        raise ValueError("candidates has no pattern. Give one or more, or None to try every scope")
    regions = PolicyRules([(part.pattern, None) for part in checked])
    return Parts(checked, {names: _owner(regions, checked, names) for names in flops})


def _owner(
    rules: PolicyRules, parts: Sequence[PrecisionPart], names: tuple[str, ...]
) -> PrecisionPart | None:
    """Returns the part that a scope is in: by the innermost scope that a pattern matches."""
    for path in _paths(names):
        decided = rules.decide(path).rule
        if decided is not None:
            return parts[decided]
    return None


def _paths(names: tuple[str, ...]) -> list[str]:
    """Returns the paths of a scope and those around it, innermost first, as autocast tries them."""
    ends = range(len(names), 0, -1)
    return ["/".join(names[start:end]) for end in ends for start in (0, 1) if start < end]


def _computes(site: Site) -> bool:
    """Whether an equation may round: it computes floats from floats, and is no move."""
    if site.bodies or site.name in IDENTITIES | WIDENED | CASTS:
        return False
    operands = [x.aval for x in site.equation.invars if not isinstance(x, core.Literal)]
    return any(map(is_inexact, site.out_avals)) and any(map(is_inexact, operands))


def _exactly(names: Sequence[str]) -> str:
    """Returns the pattern that matches one path alone.

    >>> _exactly(("LM", "blocks[0]"))
    '/LM/blocks[[]0]'
    """
    quoted = ("".join(f"[{c}]" if c in "*?[" else c for c in name) for name in names)
    return "/" + "/".join(quoted)


def _part_of_pattern(pattern: Any, flops: dict[tuple[str, ...], int]) -> PrecisionPart:
    checked = check_pattern(pattern)
    if not is_about_paths(checked):
        raise ValueError(
            f"autocast knows the names of modules, not the modules: {pattern_text(checked)!r} can "
            "match nothing. Use a pattern of names, as in '*/attention'"
        )
    inside = [names for names in flops if any(matches(checked, p, None) for p in _paths(names))]
    if not inside:
        known = sorted("/".join(names) for names in flops if names)
        raise ValueError(
            f"{pattern_text(checked)!r} matches no scope of this program. Its scopes are "
            f"{', '.join(map(repr, known[:8]))}{', ...' if len(known) > 8 else ''}"
            if known
            else NO_SCOPES
        )
    return PrecisionPart(pattern_text(checked), checked, sum(flops[names] for names in inside))
