"""Checks that no other user of the host has made a part of a path.

All users may write to a directory such as ``/tmp``. One of them could make a directory or a link there
before this process does.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

ROOT = Path("/")
MAX_LINKS = 40
"""Symbolic links that are followed in a path; the same as Linux's limit."""


def check_owners(path: Path, groups: Collection[int] = ()) -> None:
    """Refuse a path if another user could have made a part of it.

    A part may belong to root or to this user. A part of another user must be in a directory that belongs
    to root, to this user or to its owner, and that not everyone may write to. Anywhere else it must be
    open to one of ``groups`` and closed to all others.

    Raises:
        OSError: The path is not safe, or cannot be read; the text names the part.
    """
    for part, parent, entry in _parts(path):
        if not _is_safe(parent, entry, groups):
            ours = ", or with --ingest.ipc-group one of a group of this process" if groups else ""
            raise PermissionError(
                errno.EPERM,
                f"{part} belongs to user {entry.st_uid}: use a directory that no other user can create{ours}",
            )


def open_file(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Open a file to write to, unless another user has put it there; an opener for ``open``."""
    path = Path(path)
    _check_existing(path)
    opened = os.open(path, flags & ~os.O_TRUNC | os.O_CREAT | os.O_CLOEXEC, mode)
    try:
        # Checked again, since another user can have put it there meanwhile.
        _check_existing(path)
        found = os.fstat(opened)
        if not os.path.samestat(found, path.stat()):
            raise PermissionError(errno.EPERM, "another process replaces the file")
        if flags & os.O_TRUNC and stat.S_ISREG(found.st_mode):
            os.ftruncate(opened, 0)
    except OSError:
        os.close(opened)
        raise
    return opened


def prepare_directory(path: Path, group: int | None = None) -> None:
    """Create a directory for this user and ``group`` alone, or check an existing one.

    Raises:
        OSError: The directory is unsafe; the text names the remedy.
    """
    _check_existing(path)
    try:
        path.mkdir(mode=0o700, parents=True)
    except FileExistsError:
        check_owners(path)
        _inspect(path.stat(), group)
        return
    if group is not None:
        try:
            os.chown(path, -1, group)
        except PermissionError:
            # Or the next start would find the directory, and blame it.
            path.rmdir()
            raise PermissionError(errno.EPERM, f"this process is not in group {group}") from None
        # chown by a non-member clears the set-group bit, so chmod comes after it.
        path.chmod(0o2770)


@contextlib.contextmanager
def open_directory(path: Path) -> Iterator[int]:
    """Open a safe directory for calls that take a descriptor, so that nobody can replace its path."""
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        check_owners(path)
        _inspect(os.fstat(opened), None)
        yield opened
    finally:
        os.close(opened)


def _check_existing(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        check_owners(path)


def _is_safe(parent: os.stat_result, entry: os.stat_result, groups: Collection[int]) -> bool:
    trusted = (0, os.geteuid())
    if entry.st_uid in trusted:
        return True
    if stat.S_ISLNK(entry.st_mode):
        return False
    if not parent.st_mode & stat.S_IWOTH and parent.st_uid in (*trusted, entry.st_uid):
        return True
    return entry.st_gid in groups and not entry.st_mode & stat.S_IRWXO


def _parts(path: Path) -> Iterator[tuple[Path, os.stat_result, os.stat_result]]:
    """Yield each part of a path, and of its links' targets, with the stat of its directory and its own."""
    here, names, links = ROOT, [*reversed(path.absolute().parts[1:])], 0
    while names:
        name = names.pop()
        if name == os.pardir:
            here = here.parent
            continue
        part = here / name
        entry = part.lstat()
        yield part, here.lstat(), entry
        if not stat.S_ISLNK(entry.st_mode):
            here = part
            continue
        links += 1
        if links > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        target = part.readlink()
        here = ROOT if target.is_absolute() else here
        names.extend(reversed(target.parts[target.is_absolute() :]))


def _inspect(found: os.stat_result, group: int | None) -> None:
    ours = found.st_uid == os.geteuid()
    if not ours and found.st_uid != 0:
        raise PermissionError(errno.EPERM, "the directory belongs to another user")
    # In a world-writable directory any user could replace the files.
    if found.st_mode & stat.S_IWOTH and not (ours and found.st_mode & stat.S_ISVTX):
        raise PermissionError(errno.EPERM, "the directory is world-writable; use a subdirectory")
    if group is None:
        return
    if found.st_gid != group or not found.st_mode & stat.S_IXGRP:
        raise PermissionError(
            errno.EPERM,
            f"the directory is not open to group {group}; chgrp it and chmod 2770, or remove it",
        )
