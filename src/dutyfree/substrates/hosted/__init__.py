"""The substrate ``hosted``: sandboxes of a dutyfree server, on this or another machine (docs/service.md).

Start with ``substrate``, then ``connection`` (the channel to the server). ``sandbox`` has the contract and
its abilities; ``streams`` and ``processes`` what lives longer than one call. This room imports the contract,
``wire``, and from the engine the format of tree streams.
"""

from dutyfree.substrates.hosted.substrate import Hosted

__all__ = ["Hosted"]
