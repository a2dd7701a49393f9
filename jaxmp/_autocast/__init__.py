"""Mixed precision for any function: the jaxpr is planned, then run again in other dtypes."""
