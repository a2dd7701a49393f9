"""`recompute`: what is cheap is computed again for the backward pass, in place of being kept.

`_storage` decides which values are kept, `_pieces` divides a program between them, `_interpreter`
runs it, each piece in a checkpoint, `_control_flow` does so in loops and branches.
"""

from jaxmp._recompute._transform import (
    Recompute as Recompute,
    check_recompute as check_recompute,
    recompute as recompute,
)
