"""accept-head: speculative decoding that chooses its own draft length.

A trained acceptance prediction head on the draft's hidden state says when to stop drafting (SpecDec++, COLM 2025).
"""

from accept_head.errors import InputError
from accept_head.head import AcceptanceHead, HeadConfig
from accept_head.pair import Pair, load_pair
from accept_head.sampling import Sampling
from accept_head.version import VERSION

__version__ = VERSION

__all__ = ["AcceptanceHead", "HeadConfig", "InputError", "Pair", "Sampling", "__version__", "load_pair"]
