"""Arrays on the devices of a mesh: how params are stored in shards, gathered, and summed.

Two ways to write such programs. Under `jit` the partitioner places collectives: a `Layout` says for
each param how it is stored and gathered, and the folder `_float32_reduction` pins it. In a
`jax.shard_map` the user's code calls the collectives, with a `WireFormat`: the dtype that devices
send.

- `fsdp`: `FSDP` and `fully_sharded`; read it first, then `layout`, which follows a layout through
  moves of data. A move that keeps layouts is a case of `layout_after`.
- `shard_map`: `gather_params` and `reduce_gradients`; `device_sums`: the sums that they make. A new
  format for sums is a dtype in `wire_of`.
- `specs`, `placement`: trees of specs; arrays that are put on the devices of the params.
"""
