"""Tools that answer why a run overflows, where precision is lost, and what a run will cost."""
