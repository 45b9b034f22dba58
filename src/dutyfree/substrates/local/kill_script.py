"""Kill the processes of one command from inside of its sandbox, for substrates that cannot do it otherwise.

Every command has a mark in its environment, which finds its processes: children inherit it, also those that
left the session.
"""

MARK = "DUTYFREE_EXEC"
"""The variable whose value is different for each command."""

# It stops all of them first, because a shell whose child dies would continue with its next line; then it
# kills them, until none is left.
KILL_SCRIPT = """
hit() { [ "$2" = $$ ] || [ "$2" = 1 ] || { kill "$1" "$2" && found=1; } 2>/dev/null; }
each() {
  for file in $(grep -l "$2" /proc/[0-9]*/environ 2>/dev/null); do
    pid=${file#/proc/}; hit "$1" "${pid%/*}"
  done
  [ -n "$3" ] && for path in /proc/[0-9]*; do
    grep -q DUTYFREE_EXEC= "$path/environ" || grep -q "$3" "$path/cmdline" || hit "$1" "${path#/proc/}"
  done 2>/dev/null
}
n=0
while [ $n -lt 50 ]; do
  found=
  each -STOP "$@"
  each -STOP "$@"
  each -KILL "$@"
  [ -n "$found" ] || exit 0
  n=$((n+1))
done
"""
"""Arguments: the mark; and, to kill processes without a mark too, a word of the sandbox's own command."""
