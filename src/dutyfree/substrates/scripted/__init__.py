"""The substrate ``scripted``: sandboxes in memory with the answers, latencies and failures that you write.

It runs no process. The first of these that knows a command answers it:

1. ``script``: a mapping from commands to Observations, or a function from Exec to Observation or None;
   the ``seconds`` of an answer, where given, are how long it takes;
2. the configured ``exit_code`` and ``stdout``, where ``exit_code`` is set;
3. a small language, given as words or as a string without any shell syntax but quotes:
   ``true``, ``false``, ``exit N``, ``echo WORD…``, ``cat [FILE…]``, ``pwd``, ``printenv NAME``,
   ``sleep SECONDS``, and within a shell session ``cd DIRECTORY`` and ``export NAME=VALUE``;
4. exit code 127, saying so on stderr.

``servers`` maps ports to functions: from the bytes that a client sends to the bytes that it gets back.

Files, recipes and every ability work for real, in memory. The spans hold the configured times and not those
of a clock, so equal runs give equal observations. Start reading with ``substrate``. This room imports the
contract and ``engine.layers.run_stage``.

>>> script = {"make test": Observation(exit_code=2, stderr=b"1 failed", seconds=0.5)}
>>> async with Scripted(Scripted.Config(create_seconds=0.2), script=script) as substrate: ...
"""

from dutyfree.substrates.scripted.sandbox import ScriptedSandbox
from dutyfree.substrates.scripted.substrate import Script, Scripted

__all__ = ["Script", "Scripted", "ScriptedSandbox"]
