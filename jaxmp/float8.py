"""Products in float8: recipes, and the product itself for hand-written code."""

from jaxmp._policies.recipe import Recipe as Recipe, get_recipe as get_recipe
from jaxmp._primitives.float8_dot import dot_general as dot_general
