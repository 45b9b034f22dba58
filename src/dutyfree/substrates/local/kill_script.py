"""Kill the processes of one command from inside of its sandbox, for substrates that cannot do it otherwise.

Every command has a mark in its environment, which finds its processes: children inherit it, also those that
left the session.
"""

MARK = "DUTYFREE_EXEC"
"""The variable whose value is different for each command."""

KILLER = "dutyfree-killer"
"""The mark of the script itself, so that another one does not take it for a stray."""

# It stops all of them first, because a shell whose child dies would continue with its next line; then it
# kills them, until none is left.
#
# A stray is a process without a mark. PID 1 and its session stay: no command can join that session. So does
# what has the word in its command line and no parent in the sandbox: a process that the owner started. After
# the name of a process, which may have any characters, its stat has the state, parent, group and session.
KILL_SCRIPT = """
hit() { [ "$2" = $$ ] || [ "$2" = 1 ] || { kill "$1" "$2" && found=1; } 2>/dev/null; }
stray() {
  grep -q DUTYFREE_EXEC= "$1/environ" && return 1
  stat=
  while read -r line; do stat="$stat $line"; done <"$1/stat"
  word=$2
  set -- "$1" ${stat##*) }
  [ -n "$5" ] && [ "$5" != 1 ] || return 1
  [ "$3" = 0 ] && [ "$word" != - ] && grep -q "$word" "$1/cmdline" && return 1
  return 0
}
each() {
  for file in $(grep -l "$2" /proc/[0-9]*/environ 2>/dev/null); do
    pid=${file#/proc/}; hit "$1" "${pid%/*}"
  done
  [ -n "$3" ] && for path in /proc/[0-9]*; do
    stray "$path" "$3" && hit "$1" "${path#/proc/}"
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
"""Arguments: the mark; and, to kill strays too, a word in the command lines of the owner's own processes.

The word is "-" if they have a mark. It must be so if the owner starts commands without a process between:
such a command could have any word in its command line.
"""
