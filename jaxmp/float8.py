"""Products in float8: recipes, and the product itself for hand-written code."""

import typing as _typing

from jaxmp._numerics.removed_names import without as _without
from jaxmp._policies.recipe import Recipe as Recipe
from jaxmp._primitives.float8_dot import dot_general as dot_general

if not _typing.TYPE_CHECKING:  # for a type checker, any name would be there
    __getattr__ = _without(
        "jaxmp.float8",
        dict.fromkeys(
            ("Float8State", "init_state", "probes_of", "update", "with_state"),
            'jaxmp.get_policy("mixed_float8"), whose scales come from the values at hand: no state',
        ),
    )
