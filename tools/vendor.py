"""Copy uPlot, which draws the charts of the live page, from npm's archive into the package.

Run it to change the release, with the integrity that ``npm view uplot@RELEASE dist.integrity``
prints. The files and their licence are part of the package, so only this script needs npm.
"""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "uplot@1.6.32"
INTEGRITY = "sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw=="
FILES = {
    "dist/uPlot.iife.min.js": "uPlot.js",
    "dist/uPlot.min.css": "uPlot.css",
    "LICENSE": "uPlot.LICENSE",
}
"""Name in the package, by name in the archive."""
FOLDER = Path(__file__).parents[1] / "exporter" / "sidestep" / "http" / "live_page" / "vendor"
SUMS = FOLDER / "SHA256SUMS"


def main() -> None:
    """Fetch the archive, check it, and write its files and their checksums."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", "--silent", "--pack-destination", folder, PACKAGE]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (archive,) = Path(folder).glob("*.tgz")
        digest = hashlib.sha512(archive.read_bytes()).digest()
        found = f"sha512-{base64.b64encode(digest).decode()}"
        if found != INTEGRITY:
            sys.exit(f"{PACKAGE}: its integrity is {found}, not {INTEGRITY}")
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tarfile.open(archive) as files:
            for name, ours in FILES.items():
                content = files.extractfile(f"package/{name}")
                assert content is not None
                (FOLDER / ours).write_bytes(content.read())
    SUMS.write_text(
        "".join(
            f"{hashlib.sha256((FOLDER / name).read_bytes()).hexdigest()}  {name}\n"
            for name in sorted(FILES.values())
        )
    )


if __name__ == "__main__":
    main()
