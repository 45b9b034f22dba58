"""Parts for authors of substrates. docs/substrates.md shows a whole substrate that uses them.

=====================  ====================================================================================
``Commands``           runs commands on this host; a timeout or a cancellation kills the whole process tree,
                       also processes that left the session, lost their parent or emptied their environment
``EnteredSandbox``     a whole sandbox, if a program of this host can run a command in it (nsenter, ssh, …)
``FilesByCommands``    the file methods of a sandbox, if you can only run commands in it
``Collector``          keeps the head and the tail of a stream of any length, and counts the bytes between
``apply_stages``       runs the stages of a recipe in a sandbox
``refuse``             raises CreateError for images, services and limits that the substrate does not have
``require``            raises Unavailable, with the remedy, if a probe found that the substrate does not work
``closing``            closes a sandbox in any case, and raises the first error
``Reaper``             removes a directory and kills marked processes when the owner dies, also by SIGKILL
``is_alive``           whether a process, such as PID 1 of a sandbox, has not begun to exit
``remove_tree``        removes a directory tree, also with read-only directories
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
