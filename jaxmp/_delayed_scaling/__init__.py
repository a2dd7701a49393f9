"""Delayed scaling of float8 products, on a shelf of its own: only `jaxmp.float8` imports it."""
