"""What authors of substrates need again and again. docs/substrates.md shows a whole substrate made of it.

=====================  ====================================================================================
``Commands``           runs commands on this host; a timeout or a cancellation kills the whole process tree,
                       also what left the session, lost its parent or emptied its environment
``EnteredSandbox``     a whole sandbox, for who has a program of this host that runs a command in it
``FilesByCommands``    the file methods of a sandbox, for who has only a way to run commands in it
``Collector``          the head and the tail of a stream that may be endless, and how much was cut between
``apply_stages``       carries out the stages of a recipe in a sandbox
``refuse``             raises CreateError for images, services and limits that the substrate does not offer
``require``            raises Unavailable, with the remedy, where a probe found that it cannot be used
``closing``            closes a sandbox in any case, and raises the error that came first
``Reaper``             removes a directory and kills marked processes when the owner dies, by SIGKILL too
``is_alive``           whether a process, such as PID 1 of a sandbox, has not begun to end
``remove_tree``        removes a directory tree, also one with read-only directories
=====================  ====================================================================================
"""

from dutyfree.contract.output import Collector
from dutyfree.engine.layers.run_stage import apply_all as apply_stages
from dutyfree.engine.layers.run_stage import refuse
from dutyfree.substrates.local.command import Commands
from dutyfree.substrates.local.command_files import FilesByCommands
from dutyfree.substrates.local.command_sandbox import EnteredSandbox
from dutyfree.substrates.local.lifecycle import closing, require
from dutyfree.substrates.local.reaper import Reaper, is_alive, remove_tree

__all__ = [
    "Collector",
    "Commands",
    "EnteredSandbox",
    "FilesByCommands",
    "Reaper",
    "apply_stages",
    "closing",
    "is_alive",
    "refuse",
    "remove_tree",
    "require",
]
