"""Reports which operations run in which dtype, from traced and compiled programs.

`audit` traces a function. `equations.walk` reads its jaxpr as a `Program` of `Site`s: each
operation with its runs, its branches and what encloses it. `summarize.Tally` groups sites into
rows (`rows`), and `AuditReport` holds the rows: `sections` prints them, `checks` compares them with
the expectations of a test, and `lock` with a file. `collectives` does the same for a compiled
program, whose text `jaxmp._tools.hlo` reads.

Read `api` first, then `equations`, `rows` and `summarize`. A new fact about each value is a rule
for `propagate`, as in `upcasts` and `decoded`. A new row is a dataclass in `rows`, a method of
`Tally`, a field of `AuditReport`, and a table in `sections`. What no row can show goes into
`unseen`.
"""
