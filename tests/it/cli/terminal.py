#!/usr/bin/env python3
"""Runs a program on a terminal of its own, types at its prompts, and prints the screen.

  terminal.py PROGRAM TYPED ARGS...     TYPED: a JSON list, one text per prompt

Exits with the program's code; 124 where a prompt or the end does not come in time.
"""
import json, os, pty, re, select, signal, sys, time

PROMPT = b"emberflow> "
# Escape sequences, and the carriage return of a redrawn line.
ESCAPE = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\r")
PATIENCE_S = 60
QUIET_S = 0.2


def main():
    program, typed, args = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3:]
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TERM"] = "xterm"
        os.execv(program, [program, *args])
    screen, answered = b"", 0
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], QUIET_S)[0]:
            chunk = read(terminal)
            screen += chunk
            if not chunk:
                show(screen)
                sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        elif typed and len(screen) > answered and ESCAPE.sub(b"", screen).endswith(PROMPT):
            # An empty line after the prompt, and quiet: the program waits.
            answered = len(screen)
            os.write(terminal, typed.pop(0).encode())
    os.kill(pid, signal.SIGKILL)
    show(screen)
    sys.exit(124)


def read(terminal):
    try:
        return os.read(terminal, 65536)
    except OSError:  # the program has ended
        return b""


def show(screen):
    sys.stdout.buffer.write(screen)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
