"""Reads and replaces small files in a folder where other users write too, and may have put anything under any name.

What is read is a regular file of bounded size: a fifo would wait for a writer, and a link leads elsewhere. What is
written first gets a random name that did not exist, so that no link leads the write to a different file.
"""

import errno
import os
import pwd
import secrets
from pathlib import Path
from stat import S_ISLNK, S_ISREG

MOST_BYTES = 256 * 1024
"""A record of every exercise and prediction takes a third of this."""


def read(path: Path) -> tuple[str, int]:
    """Return the text of a file, and the number of the user who owns it.

    Raises:
        OSError: it cannot be read.
        ValueError: it is a link, not a regular file, too large, or not text.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ValueError("it is a link") from None
        raise
    try:
        status = os.fstat(handle)
        if not S_ISREG(status.st_mode):
            raise ValueError("it is not a regular file")
        with open(handle, "rb", closefd=False) as file:
            content = file.read(MOST_BYTES + 1)
    finally:
        os.close(handle)
    if len(content) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES // 1024} KiB")
    try:
        return content.decode(), status.st_uid
    except UnicodeDecodeError:
        raise ValueError("it is not text") from None


def replace(path: Path, content: bytes) -> None:
    """Replace a file as a whole, or make it.

    Raises:
        OSError: it cannot be written, it is a link, or it belongs to somebody else.
    """
    if path.is_symlink() or path.exists():
        status = path.lstat()
        if status.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, f"it belongs to {user(status.st_uid)}", str(path))
        if S_ISLNK(status.st_mode):
            raise PermissionError(errno.ELOOP, "it is a link", str(path))
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(temporary, flags, 0o666)  # the user's umask says who else may read it
    try:
        with open(handle, "wb") as file:
            file.write(content)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def user(number: int) -> str:
    """Return the name of a user of this machine."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def number_of(name: str) -> int | None:
    """Return the number of the user who has this name on this machine, or None."""
    try:
        return pwd.getpwnam(name).pw_uid
    except KeyError:
        return None
