"""Parameters of `learned_latency`, apart from it: the module is compiled, and msgspec structs must not be."""

import msgspec


class Parameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Where the model gets its features from.

    prefix_match_info_producer_name: The producer of the prefix matches to read.
    """

    prefix_match_info_producer_name: str = ""
