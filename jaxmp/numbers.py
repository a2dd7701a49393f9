"""Trees of numbers, for loops of your own: finite or not, one of two, roundings, halves."""

from jaxmp._numerics.split import merge_float32 as merge_float32, split_float32 as split_float32
from jaxmp._numerics.stochastic import stochastic_round as stochastic_round
from jaxmp._numerics.tree import all_finite as all_finite, select as select
