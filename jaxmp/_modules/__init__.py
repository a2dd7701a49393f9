"""Rules for the modules of any library: decisions, the scopes that carry them, tables."""
