"""Mixed precision for any function: the jaxpr is planned, then run again; see README.md."""
