"""Owners of paths: no other user of the host may have put a part of a path there.

A directory such as ``/tmp`` is open to all users: one of them could make a directory or a link in it before
this process does.
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
    """Refuse a path of which another user could have made a part.

    Root and this user may have made any part. A directory or file of another user is accepted where
    root, this user or the same user gave it that place: in a directory that not all may write to.
    Elsewhere it must be open to one of ``groups`` and closed to all others.

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
    """Open a file to write to, but none that another user put there; may be the opener of ``open``.

    Raises:
        OSError: It cannot be opened, or is not safe.
    """
    path = Path(path)
    _check_existing(path)
    opened = os.open(path, flags & ~os.O_TRUNC | os.O_CREAT | os.O_CLOEXEC, mode)
    try:
        # Again, since it can have been put there meanwhile.
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
        os.chown(path, -1, group)
        # chown by a non-member clears the set-group bit, so chmod comes after it.
        path.chmod(0o2770)


@contextlib.contextmanager
def open_directory(path: Path) -> Iterator[int]:
    """Open a directory that is safe, for calls that take one; the path cannot be replaced meanwhile.

    Raises:
        OSError: It cannot be opened, or is not safe.
    """
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
    """Yield each part of a path, links and their targets included, with its directory's attributes and its own."""
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
