"""``scripts/gpu_pack``: what a machine with a GPU and no network lacks, in a folder of the tree.

``.gpu/``, which git ignores, gets one archive of what the wheels hold, without what no server
imports, and the headers of OpenSSL, which SGLang compiles its page hash with.
``scripts/gpu_report`` unpacks both there (``unpack.py``). ``--have FILE`` names what the machine
brings beside torch (``python -m pip list --format=freeze``); by default a list of such a machine,
``machine.txt``.
"""

from __future__ import annotations

import argparse
import io
import platform
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from gpu_report import wheels

MOST_BYTES = 40 << 20
"""Of the folder and the tree together, so that they travel in one piece."""

# Never imported by a server there, as its list of modules showed: 114 of 304 MB, with most of what
# is left out.
LEFT_OUT = {
    *("IPython", "asttokens", "bin", "cffi", "executing", "grpc_health", "grpc_reflection", "jedi"),
    *("matplotlib_inline", "parso", "pexpect", "prompt_toolkit", "ptyprocess", "pure_eval"),
    *("pycparser", "share", "smg_grpc_proto", "stack_data", "wcwidth"),
    *("sglang/multimodal_gen", "sglang/test"),
}
EXTENSIONS = "sglang/srt/rust_extensions"
"""Servers of their own kind, 40 MB."""

STAND_INS = {
    "IPython/__init__.py": "def get_ipython():\n    return None\n",
    "IPython/display.py": (
        "class HTML:\n    def __init__(self, data=None):\n        self.data = data\n\n\n"
        "def display(*given, **options):\n    pass\n"
    ),
}
"""What SGLang imports of IPython at its start."""

INCLUDES = (Path("/usr/include"), Path("/usr/include") / f"{platform.machine()}-linux-gnu")


def main(arguments: list[str] | None = None) -> int:
    """0 once the folder is whole and small enough. What pip refuses, it says itself."""
    parser = argparse.ArgumentParser(prog="scripts/gpu_pack", description=__doc__.split("\n\n")[0])
    parser.add_argument("--have", type=Path, metavar="FILE", help="pip freeze of that machine")
    parser.add_argument("--out", type=Path, default=wheels.ROOT / ".gpu", help="folder (.gpu)")
    options = parser.parse_args(arguments)
    have = options.have or Path(__file__).with_name("machine.txt")
    try:
        lines = have.read_text()
    except OSError as error:
        print(f"scripts/gpu_pack: --have {have}: {error.strerror}.", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        files, site = Path(place) / "wheels", Path(place) / "site"
        try:
            print(wheels.gather(files, wheels.read_have(lines)), flush=True)
            _install(sorted(files.glob("*.whl")), site)
        except subprocess.CalledProcessError as error:
            return int(error.returncode)
        pack_site(site, options.out / "site.tar.xz")
    if not pack_headers(options.out / "openssl.tar.xz"):
        print("OpenSSL's headers are not here; there it takes its own, or has no NVMe tier.")
    carried = sum(path.stat().st_size for path in options.out.iterdir())
    tree = _tree_bytes()
    print(
        f"{options.out}: {carried / 2**20:.1f} MiB, with the tree {(carried + tree) / 2**20:.1f} "
        f"of at most {MOST_BYTES >> 20} MiB"
    )
    return 0 if carried + tree <= MOST_BYTES else 1


def pack_site(site: Path, archive: Path, python_version: str = wheels.PYTHON_VERSION) -> None:
    """One archive of installed packages, the same bytes for the same packages."""
    with _archive(archive) as packed:
        for name, text in (*STAND_INS.items(), (".python-version", python_version)):
            entry = tarfile.TarInfo(name)
            entry.size = len(text)
            packed.addfile(entry, io.BytesIO(text.encode()))
        for path in sorted(site.rglob("*")):
            name = path.relative_to(site).as_posix()
            above = [name, *(parent.as_posix() for parent in Path(name).parents)]
            if LEFT_OUT.intersection(above) or "__pycache__" in path.parts:
                continue
            if path.suffix == ".pyc" or (name.startswith(EXTENSIONS) and path.suffix == ".so"):
                continue
            if path.is_file():
                packed.add(path, name, filter=_plain)


def pack_headers(archive: Path) -> bool:
    """OpenSSL's headers of this machine; False where there are none."""
    found = [folder / "openssl" for folder in INCLUDES if (folder / "openssl").is_dir()]
    if not any((folder / "sha.h").exists() for folder in found):
        return False
    with _archive(archive, dereference=True) as packed:
        for folder in found:
            for path in sorted(folder.iterdir()):
                packed.add(path, f"openssl/{path.name}", filter=_plain)
    return True


def _archive(path: Path, **options: bool) -> tarfile.TarFile:
    return tarfile.open(path, "w:xz", preset=6, **options)


def _plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without what differs from machine to machine."""
    entry.mtime = entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    return entry


def _install(files: list[Path], site: Path) -> None:
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"),
            *("--no-index", "--no-deps", "--no-compile", "--only-binary", ":all:"),
            *("--python-version", wheels.PYTHON_VERSION, "--target", str(site), *map(str, files)),
        ],
        check=True,
    )


def _tree_bytes() -> int:
    """Of the files that travel: those that git tracks, and new ones it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=wheels.ROOT,
        check=True,
        capture_output=True,
    ).stdout
    paths = (wheels.ROOT / name.decode() for name in listed.split(b"\0") if name)
    return sum(path.lstat().st_size for path in paths if path.is_symlink() or path.exists())


if __name__ == "__main__":
    sys.exit(main())
