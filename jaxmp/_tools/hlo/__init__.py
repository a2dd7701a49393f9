"""Reads the text of compiled programs, as JAX's compilers print it."""
