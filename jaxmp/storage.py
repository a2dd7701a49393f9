"""What an optimizer stores: moments in 16 or 8 bits, and a state in another form than it has.

`jaxmp.mixed_precision(optimizer, policy, master=..., moments=...)` stores all of it; these are for
a part of an optimizer, and for a state that is there already.
"""

from jaxmp._training.compact_forms import expanded_state as expanded_state
from jaxmp._training.compact_state import compact_state as compact_state
from jaxmp._training.convert_state import convert_state as convert_state
