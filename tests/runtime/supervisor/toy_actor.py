"""A test's actor: the standard library only, so that it starts in milliseconds. What it does stands in $TOY_DIR/<name>, as words.

Usage: toy_actor.py NAME. Words: crash, exit0, configuration (exit status 2), mute (never ready), slow (waits for a writer of the
FIFO $TOY_DIR/<name>.go before it is ready), takeover-crash, dies (once active), hang (stops beating once active), stubborn (ignores
SIGTERM), drains (ends at the second), parent (has a child once active), asks-… (once active, sends the supervisor each of these
requests and prints the answer: status, debug, down, and kill or restart of decode), child-asks-… and orphan-asks-… (a process of its
own does so, with this parent or with none).
"""

import contextlib
import fcntl
import os
import select
import signal
import socket
import sys


def main(name: str) -> int:
    toys = os.environ["TOY_DIR"]
    words = read(f"{toys}/{name}").split()
    wake, woken = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.write(woken, b"t"))
    print(f"{name} begins", flush=True)
    event(toys, f"start {name}")
    if "stubborn" in words:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if "drains" in words:
        signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    if "crash" in words:
        print("Traceback: the toy is broken", file=sys.stderr, flush=True)
        return 1
    if "exit0" in words:
        return 0
    if "configuration" in words:
        return 2
    if "mute" in words:
        signal.pause()
    if "slow" in words:
        # Opening a FIFO waits for its writer.
        open(f"{toys}/{name}.go").close()
    run = os.environ["MMRT_RUN_DIR"]
    generation = next_generation(f"{run}/{name}.lock")
    event(toys, f"ready {name}")
    notify(name, generation, "READY=1")
    lock = os.open(f"{run}/{name}.lock", os.O_RDWR | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    if "takeover-crash" in words:
        return 1
    if "parent" in words:
        os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "1000")
    event(toys, f"active {name}")
    notify(name, generation, "X_MMRT_ACTIVE=1")
    if "dies" in words:
        return 1
    for word in words:
        asker, _, asked = word.rpartition("asks-")
        if asked and not asker:
            ask(run, asked)
        elif asker == "child-":
            os.spawnl(os.P_NOWAIT, sys.executable, sys.executable, __file__, "--ask", asked)
        elif asker == "orphan-":
            os.system(f"'{sys.executable}' '{__file__}' --ask {asked} &")
    beat_ms = int(os.environ["WATCHDOG_USEC"]) // 4000
    lifeline = int(os.environ["MMRT_LIFELINE_FD"])
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    poll.register(wake, select.POLLIN)
    while True:
        if "hang" not in words:
            notify(name, generation, "WATCHDOG=1")
        for fd, _ in poll.poll(None if "hang" in words else beat_ms):
            event(toys, f"{'orphan' if fd == lifeline else 'stop'} {name}")
            notify(name, generation, "STOPPING=1")
            return 0


def ask(run: str, kind: str) -> None:
    fields = "" if kind in ("status", "down") else ',"actor":"decode"'
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(f"{run}/control")
        control.sendall(f'{{"type":"{kind}"{fields}}}\n'.encode())
        print(control.recv(4096).decode(), end="", flush=True)


def read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except FileNotFoundError:
        return ""


def event(toys: str, text: str) -> None:
    with open(f"{toys}/events", "a") as file:
        file.write(f"{text} {os.getpid()}\n")


def next_generation(path: str) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        generation = int.from_bytes(os.pread(fd, 8, 0), "little") + 1
        os.pwrite(fd, generation.to_bytes(8, "little"), 0)
        return generation
    finally:
        os.close(fd)


def notify(name: str, generation: int, assignment: str) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        text = f"{assignment}\nX_MMRT_ACTOR={name}\nX_MMRT_GENERATION={generation}"
        with contextlib.suppress(ConnectionRefusedError, FileNotFoundError):  # a supervisor that has ended; the caller sees that next
            sender.sendto(text.encode(), os.environ["NOTIFY_SOCKET"])


if __name__ == "__main__":
    sys.exit(ask(os.environ["MMRT_RUN_DIR"], sys.argv[2]) if sys.argv[1] == "--ask" else main(sys.argv[1]))
