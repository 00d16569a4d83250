"""StackStorm pack as an archive with Steward's wheel, because no package index has Steward."""

import tarfile
from io import BytesIO
from pathlib import Path
from typing import Final

PACK: Final = Path(__file__).resolve().parent.parent.parent / "packs" / "slurm"
_LEFT_OUT: Final = ("__pycache__", "wheels", "tests")


def build(wheel: Path, out: Path, *, version: str, epoch: int, pack: Path = PACK) -> Path:
    """Write the pack's archive: a directory ``slurm`` with the wheel in ``wheels/``.

    Args:
        wheel: Steward's wheel.
        out: Directory for the archive.
        version: Steward's version.
        epoch: Time of every file, in seconds since 1970.
        pack: The pack's directory.

    Returns:
        The archive.
    """
    files = {
        path.relative_to(pack): path
        for path in pack.rglob("*")
        if path.is_file() and not set(path.relative_to(pack).parts) & set(_LEFT_OUT)
    }
    files[Path("wheels", wheel.name)] = wheel
    made = out / f"stackstorm-pack-slurm-{version}.tar"
    with tarfile.open(made, "w", format=tarfile.PAX_FORMAT) as archive:
        for name, path in sorted(files.items()):
            data = path.read_bytes()
            member = tarfile.TarInfo(str(Path("slurm") / name))
            member.size, member.mtime = len(data), epoch
            member.mode = 0o755 if name.parts[0] == "bin" else 0o644
            archive.addfile(member, BytesIO(data))
    return made
