"""Finds the policy of an operation by the scopes that it was traced in."""

import functools
from typing import Any, NamedTuple

from jaxmp._autocast.strengths import FLOAT32, Strength
from jaxmp._numerics.dtypes import DType
from jaxmp._numerics.precision import precision_of
from jaxmp._policies.policy import Policy, get_policy, short_name
from jaxmp._policies.policy_rules import PolicyRules
from jaxmp._policies.presets import family_left_out
from jaxmp._policies.recipe import Recipe
from jaxmp._program.scopes import names_in

# Operations in these scopes stay as traced. In EXACT, products without a precision get float32's:
# JAX traces derivative rules later, when a context around the function has ended. In DONE, an inner
# autocast has decided. Scopes survive jit, scan, remat and differentiation.
EXACT = "jaxmp.full_precision"
DONE = "jaxmp.autocast"
# A gradient with a loss scale of its own, inside of a function under autocast.
SCALED = "jaxmp.scaled"
# The rest of the name of such a scope is the policy that holds in it.
POLICY = "jaxmp.policy:"


class Region(NamedTuple):
    """The precision of an operation.

    Attributes:
      low: the dtype of products; float32 if the operation runs as traced.
      float32_gradients: whether gradients of parameters come out of products in float32.
      result: the strength of floats that leave an exact region.
      sealed: whether no dtype inside may change, whatever the scopes inside say.
      precision: that of products in float32 which name none themselves; None leaves JAX's.
      products: the float8 recipe of products with params, or None.
      exclusion: why there is no recipe, for a family of modules that is left out of float8.
    """

    low: DType
    float32_gradients: bool = True
    result: Strength = Strength.FIRM
    sealed: bool = False
    precision: str | None = None
    products: Recipe | None = None
    exclusion: str | None = None

    @property
    def exact(self) -> bool:
        """Whether the operation runs as it was traced."""
        return self.low == FLOAT32


def region_of(policy: Policy | None) -> Region:
    """Returns the region of a policy; None leaves operations as traced."""
    if policy is None:
        return Region(FLOAT32)
    precision = precision_of(policy.precision)
    if policy.compute_dtype.itemsize >= FLOAT32.itemsize:
        return Region(FLOAT32, precision=precision)
    in_float32 = policy.reduce_dtype.itemsize >= FLOAT32.itemsize
    return Region(policy.compute_dtype, in_float32, precision=precision, products=policy.products)


@functools.lru_cache(maxsize=4096)
def scopes(stack: Any) -> tuple[str, ...]:
    """Returns the names in a name stack, without its transformations.

    >>> scopes("transpose(jvp(LM))/Block_0/jvp()/q")
    ('LM', 'Block_0', 'q')
    """
    return names_in(str(stack))


def policy_scope(policy: Policy | None) -> str:
    """Returns the name of a scope in which a policy holds; None leaves its operations alone."""
    return POLICY + ("none" if policy is None else short_name(policy))


class Regions:
    """The policy of each part of a program: one policy, or rules over the scopes."""

    def __init__(self, policy: Policy | PolicyRules) -> None:
        self._by_name = isinstance(policy, PolicyRules)
        self._rules = policy if isinstance(policy, PolicyRules) else PolicyRules(default=policy)
        self._regions: dict[tuple[str, ...], Region] = {}

    def of(self, names: tuple[str, ...]) -> Region:
        """Returns the region of an operation that was traced in these scopes."""
        if SCALED in names:  # decides nothing
            return self.of(tuple(name for name in names if name != SCALED))
        if names not in self._regions:
            if marks := [name for name in names if name in (EXACT, DONE)]:
                strength = Strength.FIRM if EXACT in marks else Strength.HIGH
                precision = precision_of(None) if marks[-1] == EXACT else None
                region = Region(FLOAT32, result=strength, sealed=True, precision=precision)
                self._regions[names] = region
            elif policies := [name for name in names if name.startswith(POLICY)]:
                text = policies[-1].removeprefix(POLICY)
                self._regions[names] = region_of(None if text == "none" else get_policy(text))
            else:
                self._regions[names] = self._by_rules(names)
        return self._regions[names]

    def _by_rules(self, names: tuple[str, ...]) -> Region:
        # The innermost scope with a rule decides. The first scope may be the model's own name,
        # which patterns do not have.
        for end in range(len(names), 0, -1):
            for start in (0, 1):
                decision = self._rules.decide("/".join(names[start:end]))
                if decision.rule is not None and start < end:
                    return region_of(decision.policy)
        region = region_of(self._rules.default)
        # Where no rule decides, heads, embeddings and routers are left out of float8.
        family = None if region.products is None else family_left_out("/".join(names))
        return region if family is None else region._replace(products=None, exclusion=family)

    def deciding_scopes(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Returns the scopes among `names` that can decide the policy inside."""
        if self._by_name:
            return names
        marks = (POLICY, EXACT, DONE)
        return tuple(name for name in names if name.startswith(marks) or family_left_out(name))

    def paths(self) -> set[str]:
        """Returns the paths of all scopes that were looked up, and of the scopes around them."""
        return {
            "/".join(names[start:end])
            for names in self._regions
            for start in (0, 1)
            for end in range(start, len(names) + 1)
        }
