"""Looks at the numbers of a run: overflows, histograms, precision, and where two programs part.

Most functions of `jaxmp.diagnostics` have a file here; large reports, with the tables that they
print, have another (`overflow`, `comparison`, `sensitivity_report`). `rerun.Rerun` runs a traced
program again, and knows the place of each operation. `one_by_one` does so in Python, value by
value, for `find_overflow`. `scope_values` catches what modules hand on, for `compare` and
`activation_histograms`. `roundings` runs a low program in float32, with its roundings in the hands
of a subclass: `smooth_comparisons` gives comparisons a derivative, `first_order` counts errors,
and `prediction` sorts them by part for `sensitivity`.

Read `rerun` first, then `scope_values`. A new tool that follows values is a subclass of `Rerun`, or
a function for `keep` of `scope_values`. A column of the histogram report is a row of `_COLUMNS` in
`underflow_report`. Tools that read numbers on the host begin with `check_numbers`: under `jit`
there are none.
"""
