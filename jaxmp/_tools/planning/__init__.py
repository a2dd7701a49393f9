"""Plans memory before a long run.

`memory_plan` makes the train step with abstract arguments (`planned_step`), compiles it for a
device that need not be here (`absent_devices`), and returns a `MemoryPlan` (`memory_rows`).

Read `memory_plan` first. `devices` is the table of devices, from the data sheets of their makers: a
new device is a line of `_TABLE`. To compile for it too, a TPU needs an entry in `_TOPOLOGIES` and a
GPU one in `_CHIPS`, both in `absent_devices`. A new part of a plan is a name in `MEANING`
of `memory_rows`.
"""
