"""Tools that import the core and that the core never imports: they load when first used.

`hlo` reads the text of compiled programs, `inspect` audits programs, `diagnostics` finds the
operation that overflows, `planning` estimates memory and time, `command` is the `jaxmp` command.
"""
