"""Make what ``scripts/gpu_pack`` packed usable, and say to a shell what to export.

    eval "$(python3 benchmark/gpu_report/unpack.py .gpu)"

Needs the standard library alone. Unpacked once a machine, into a folder for temporary files.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
PROBE = "#include <openssl/sha.h>\n"


def main() -> int:
    """Print ``export`` lines; 2 where the archive was made for another Python."""
    carried = Path(sys.argv[1])
    place = Path(tempfile.gettempdir()) / "gpu-report"
    site = place / "site"
    archive = carried / "site.tar.xz"
    with archive.open("rb") as file:  # sent again, an archive has another time
        stamp = f"{hashlib.file_digest(file, 'blake2b').hexdigest()} {ROOT}"
    if not (site / ".done").exists() or (site / ".done").read_text() != stamp:
        site.mkdir(parents=True, exist_ok=True)
        _extract(archive, site)
        _describe_package(site)
        (site / ".done").write_text(stamp)
    if (made_for := (site / ".python-version").read_text()) != VERSION:
        print(f"{archive} is for Python {made_for}, and this is {VERSION}.", file=sys.stderr)
        return 2
    exports = {
        # ninja and ptxas are called by name.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join([str(site), str(ROOT / "python"), str(ROOT / "kernels")]),
        "PYTHON": sys.executable,
        "XDG_CACHE_HOME": str(place / "cache"),
        "TORCH_EXTENSIONS_DIR": str(place / "cache" / "extensions"),
        "TRITON_CACHE_DIR": str(place / "cache" / "triton"),
        # No network, one machine: nothing is looked for elsewhere.
        "HF_HUB_OFFLINE": "1",
        "no_proxy": "*",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "SGLANG_HOST_IP": "127.0.0.1",
        "TORCHDYNAMO_DISABLE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    exports |= _headers(carried / "openssl.tar.xz", place / "openssl")
    for name, value in exports.items():
        print(f"export {name}={shlex.quote(value)}")
    return 0


def _extract(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as packed:
        # Python 3.11.2, which Debian 12 has, knows no filters: the archive is our own.
        packed.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        packed.extractall(folder)


def _describe_package(site: Path) -> None:
    """The package itself: SGLang finds platform and tiers by entry points, which need its metadata
    only."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    name, version = project["name"], project["version"]
    folder = site / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in points.items())]
    (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")
    (folder / "RECORD").touch()


def _headers(archive: Path, place: Path) -> dict[str, str]:
    """Headers, and a name to link by, where the machine has the library alone."""
    probe = ["g++", "-x", "c++", "-fsyntax-only", "-"]
    try:
        has = subprocess.run(probe, input=PROBE, capture_output=True, text=True, check=False)
    except OSError:
        return {}  # no compiler: the server says that it needs one
    if has.returncode == 0 or not archive.exists():
        return {}
    include, library = place / "include", place / "lib"
    _extract(archive, include)
    library.mkdir(parents=True, exist_ok=True)
    known = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    found = [line.split()[-1] for line in known.splitlines() if "libcrypto.so.3" in line]
    if found:
        link = library / "libcrypto.so"
        link.unlink(missing_ok=True)
        link.symlink_to(found[0])
    return {"CPATH": str(include), "LIBRARY_PATH": str(library)}


if __name__ == "__main__":
    sys.exit(main())
