"""The `jaxmp` command: what the library answers, on a command line."""
