"""The command line: one module for each family of commands, named after the command.

Start with ``main`` (what happens around a command) and ``commands`` (the list of all commands, and the
parser). ``console`` prints, ``progress`` shows long work, ``signals`` handles Ctrl-C, ``option_values``
reads what users type. Commands are thin: the work is in the library. Everything may be imported here, and
nothing imports this package. A command imports only what it needs, so that it starts fast.
"""
