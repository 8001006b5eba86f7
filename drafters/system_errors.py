# What the system refuses (a disk, a pipe, a limit), in words: what a person can do about it.

import errno
import os
import sys

__all__ = ["KEPT", "advice", "leave_pipe", "what_to_do"]

KEPT = "finished work is kept; the same command goes on from there"
ADVICE = {
    (errno.ENOSPC, errno.EDQUOT): "free some space",
    (errno.EFBIG,): "raise the limit on the size of files (ulimit -f), or choose a disk that takes larger ones",
    (errno.EROFS,): "choose a folder on a disk that can be written",
    (errno.EACCES, errno.EPERM): "give this user the right, or choose another place",
    (errno.ENAMETOOLONG,): "choose a shorter name or folder",
    (errno.EMFILE, errno.ENFILE): "raise the limit on open files (ulimit -n)",
    (errno.EIO, errno.ESTALE, errno.ENOTCONN, errno.ENXIO, errno.ETIMEDOUT): "the disk or network gave no answer: see "
    "that it is there",
    (errno.ENOENT,): "something that was there is gone: make it again, or change into a folder that exists",
    (errno.ENOMEM,): "free some memory",
}


def advice(error: OSError) -> str | None:
    """The next step, None where the number of the error tells too little."""
    return next((text for numbers, text in ADVICE.items() if error.errno in numbers), None)


def what_to_do(error: OSError) -> str:
    """The next step after an error that no setting explains."""
    return f"{advice(error) or 'mend that (DRAFTERS_DEBUG=1 shows where it came from)'}; {KEPT}"


def leave_pipe() -> None:
    """Point stdout to nowhere: what is still to be flushed would fail once more at the end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
