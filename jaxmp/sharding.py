"""Tools for params and gradients that are spread over devices.

Under `jit` with sharded arrays, `jaxmp.value_and_grad(..., reduce_dtype=jnp.float32)` is all that
is needed. `gather_params` and `reduce_gradients` are for code inside of a `jax.shard_map`;
`per_shard` differentiates the losses of the devices one by one and sums in float32;
`state_shardings` places the state of an optimizer where its params are; `collectives` reads what a
compiled program sends between devices.
"""

from jaxmp._mesh.fsdp import FSDP as FSDP, fully_sharded as fully_sharded
from jaxmp._mesh.shard_map import (
    gather_params as gather_params,
    reduce_gradients as reduce_gradients,
)
from jaxmp._tools.inspect.collectives import collectives as collectives
from jaxmp._training.per_shard import per_shard as per_shard
from jaxmp._training.state_shardings import state_shardings as state_shardings
