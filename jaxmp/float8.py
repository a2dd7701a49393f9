"""Products in float8: recipes, the product itself for hand-written code, and delayed scaling."""

from jaxmp._delayed_scaling.state import (
    Float8State as Float8State,
    init_state as init_state,
    probes_of as probes_of,
    update as update,
    with_state as with_state,
)
from jaxmp._policies.recipe import Recipe as Recipe
from jaxmp._primitives.float8_dot import dot_general as dot_general
