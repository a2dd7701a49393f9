"""Reads, follows and rewrites jaxprs."""
