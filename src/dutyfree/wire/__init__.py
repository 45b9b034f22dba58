"""What travels between a dutyfree server and its clients: messages, calls, errors and recipes.

Start with ``frames`` (the channel on which many calls run at once), then ``calls`` (the table of all calls,
with the types of their arguments and results). ``codec`` has the encoding, ``arguments`` bounds what clients
send, ``errors`` turns exceptions into data and back, ``recipes`` takes the files out of recipes. This room
imports the contract only; the server and the substrate ``hosted`` import it.
"""
