"""`python -m jaxmp` is the `jaxmp` command."""

import sys

from jaxmp._tools.command.main import main as main

if __name__ == "__main__":
    sys.exit(main())
