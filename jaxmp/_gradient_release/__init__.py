"""`release_gradients`: updates each layer where its gradient is made, and keeps no gradients.

A step over a scan of layers keeps the gradients of all layers until the optimizer has them all.
Here the backward scan carries the params and the state, and updates one layer in each turn.

The `Program` of a whole step flows through. `values.py` reads it into values that are not computed
yet. `slices.py` says how an operation runs on the slice of one layer, `events.py` when each value
can be there, whole or as slices. `plan.py` goes back from the results and lists what runs when;
`passes.py` runs it: a loop runs again where an update waits for a norm. `api.py` is the function.

Read `values.py` first. A rule for a primitive is an entry of `AXES` in `slices.py`.
docs/gradients.md is for users.
"""
