"""Plays slurmctld: writes jobs into a spool as it does, as fast or as slowly as it is told.

Run as a program it is the other side of a measurement, so that its CPU time is
not the watcher's. What a job's script and environment hold follows from its
id alone: whoever looks at an archive later can tell what should be in it.
"""

import argparse
import base64
import json
import os
import struct
import time
from collections import deque
from functools import cache
from pathlib import Path

_USERS = 50
_SCRIPT_BODY = b"".join(
    b"srun --exclusive -n 1 ./simulate --input data/part%03d.in --seed %d > log.%03d &\n"
    % (part, part * 7919, part)
    for part in range(22)
)
_PREFIX = b"/opt/software/easybuild/2026a/"
_MODULES = (
    *(b"GCCcore/15.2.0", b"zlib/1.3.2-GCCcore-15.2.0", b"binutils/2.45-GCCcore-15.2.0"),
    *(b"GCC/15.2.0", b"numactl/2.0.20-GCCcore-15.2.0", b"hwloc/2.13.0-GCCcore-15.2.0"),
    *(b"UCX/1.20.0-GCCcore-15.2.0", b"PMIx/6.1.0-GCCcore-15.2.0", b"OpenMPI/5.0.10-GCC-15.2.0"),
    *(b"OpenBLAS/0.3.31-GCC-15.2.0", b"FFTW/3.3.10-gompi-2026a", b"ScaLAPACK/2.2.3-gompi-2026a"),
    *(b"Python/3.14.2-GCCcore-15.2.0", b"HDF5/2.0.0-gompi-2026a"),
    *(b"SciPy-bundle/2026.03-gfbf-2026a", b"foss/2026a", b"simulator/4.2-foss-2026a"),
)
"""Modules that are loaded, as EasyBuild names them."""
_COLORS = {
    b"01;31": b"tar tgz arc arj taz lha lz4 lzh lzma tlz txz tzo t7z zip z dz gz lrz lz lzo xz zst"
    b" tzst bz2 bz tbz tbz2 tz deb rpm jar war ear sar rar alz ace zoo cpio 7z rz cab wim swm",
    b"01;35": b"avif jpg jpeg mjpg mjpeg gif bmp pbm pgm ppm tga xbm xpm tif tiff png svg svgz mng"
    b" pcx mov mpg mpeg m2v mkv webm webp ogm mp4 m4v mp4v vob qt nuv wmv asf rm rmvb flc avi",
    b"00;36": b"aac au flac m4a mid midi mka mp3 mpc ogg ra wav oga opus spx xspf",
    b"00;90": b"bak old orig part rej swp tmp dpkg-dist dpkg-old ucf-dist ucf-new rpmnew rpmsave",
}
"""Extensions by their color in LS_COLORS."""
_MODULE_FUNCTION = b"""() {  local _shell=bash _xtrace= _status;
 if [ -n "${LMOD_SH_DBG_ON-}" ]; then
 case "$-" in
 *x*) _xtrace=1; set +x ;;
 esac;
 echo "tracing is off while modules change the environment" 1>&2;
 fi;
 eval "$(${LMOD_CMD:-/usr/share/lmod/lmod/libexec/lmod} $_shell "$@")";
 _status=$?;
 if [ $_status -eq 0 ]; then
 eval "$(${LMOD_SETTARG_CMD:-:} -s sh)";
 _status=$?;
 fi;
 if [ -n "$_xtrace" ]; then
 set -x;
 fi;
 return $_status
}"""


def _variables(user: bytes) -> list[bytes]:
    """What the login and the modules of a user set: the same for each of their jobs."""
    names = [module.partition(b"/")[0].upper().replace(b"-", b"MIN") for module in _MODULES]
    table = b"".join(
        b'%(name)s = {\nfn = "/opt/modules/all/%(module)s.lua",\nfullName = "%(module)s",\n'
        b'propT = {},\nstatus = "active",\nuserName = "%(module)s",\n},\n'
        % {b"name": name, b"module": module}
        for name, module in zip(names, _MODULES, strict=True)
    )
    encoded = base64.b64encode(b"_ModuleTable_ = {\nMTversion = 3,\nmT = {\n%s},\n}\n" % table)
    pieces = [encoded[start : start + 512] for start in range(0, len(encoded), 512)]
    files = [b"/opt/modules/all/%s.lua" % module for module in _MODULES]
    colors = b"".join(
        b"*.%s=%s:" % (extension, color)
        for color, extensions in _COLORS.items()
        for extension in extensions.split()
    )
    return [
        *(b"SHELL=/bin/bash", b"LANG=en_GB.UTF-8", b"TERM=xterm-256color", b"HISTSIZE=1000"),
        *(b"HOME=/home/%s" % user, b"USER=%s" % user, b"LOGNAME=%s" % user),
        *(b"MAIL=/var/mail/%s" % user, b"LESSOPEN=||/usr/bin/lesspipe.sh %s"),
        *(b"LMOD_CMD=/usr/share/lmod/lmod/libexec/lmod", b"MODULEPATH=/opt/modules/all"),
        b"LS_COLORS=rs=0:di=01;34:ln=01;36:pi=40;33:so=01;35:or=40;31;01:ex=01;32:" + colors,
        b"BASH_FUNC_module%%=" + _MODULE_FUNCTION,
        b"PATH=/home/%s/bin:%s:/usr/local/bin:/usr/bin:/bin" % (user, _below(b"bin")),
        b"LD_LIBRARY_PATH=" + _below(b"lib"),
        b"LIBRARY_PATH=" + _below(b"lib"),
        b"CPATH=" + _below(b"include"),
        b"MANPATH=" + _below(b"share/man"),
        b"PKG_CONFIG_PATH=" + _below(b"lib/pkgconfig"),
        b"CMAKE_PREFIX_PATH=" + _below(b""),
        b"LOADEDMODULES=" + b":".join(_MODULES),
        b"_LMFILES_=" + b":".join(files),
        *(
            b"EB%s%s=%s" % (what, name, value)
            for name, module in zip(names, _MODULES, strict=True)
            for what, value in (
                (b"ROOT", _PREFIX + module),
                (b"VERSION", module.partition(b"/")[2]),
                (b"DEVEL", b"%s%s/easybuild/devel" % (_PREFIX, module)),
            )
        ),
        *(b"_ModuleTable%03d_=%s" % (number, piece) for number, piece in enumerate(pieces, 1)),
        b"_ModuleTable_Sz_=%d" % len(pieces),
    ]


def _below(directory: bytes) -> bytes:
    """A list with this directory of every module."""
    return b":".join(b"%s%s/%s" % (_PREFIX, module, directory) for module in _MODULES)


@cache
def _block_of(user: bytes) -> bytes:
    return b"\0".join(_variables(user)) + b"\0"


def script_of(job_id: int) -> bytes:
    """The script of a job, about 2 kB; no two jobs have the same."""
    return (
        b"#!/bin/bash\n#SBATCH --job-name=storm-%d\n#SBATCH --ntasks=4\n#SBATCH --time=01:00:00\n"
        b"module load foss/2026a simulator/%d\n%swait\n" % (job_id, job_id % 97, _SCRIPT_BODY)
    )


def secret_of(job_id: int) -> bytes:
    """A value that the environment of a job holds and that must be in no file of Steward's."""
    return b"hush-%d-%x-not-for-disk" % (job_id, job_id * 2654435761 % 2**32)


def environment_of(job_id: int, secret: bytes | None = None) -> bytes:
    """The environment file of a job, about 18 kB in 90 variables, as slurmctld writes it.

    Args:
        job_id: The job.
        secret: Put in place of its secret value.
    """
    user = b"user%02d" % (job_id % _USERS)
    secret = secret_of(job_id) if secret is None else secret
    block = _block_of(user) + (
        b"SERVICE_TOKEN=%(secret)s\0"
        b"PWD=/home/%(user)s/run%(job)d\0OLDPWD=/home/%(user)s\0"
        b"SLURM_JOB_NAME=storm-%(job)d\0SLURM_SUBMIT_DIR=/home/%(user)s/run%(job)d\0"
        b"SLURM_SUBMIT_HOST=login1\0SLURM_PRIO_PROCESS=0\0SLURM_UMASK=0022\0"
    ) % {b"user": user, b"secret": secret, b"job": job_id}
    return struct.pack("=I", block.count(b"\0")) + block


def write_job(spool: str, job_id: int) -> int:
    """Write one job in slurmctld's order; returns when its script was closed (monotonic ns)."""
    directory = f"{spool}/hash.{job_id % 10}/job.{job_id}"
    script, environment = script_of(job_id), environment_of(job_id)
    try:
        os.mkdir(directory, 0o700)
    except FileNotFoundError:
        os.mkdir(os.path.dirname(directory), 0o700)
        os.mkdir(directory, 0o700)
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    fd = os.open(f"{directory}/environment", flags, 0o600)
    os.write(fd, environment)
    os.close(fd)
    fd = os.open(f"{directory}/script", flags, 0o600)
    os.write(fd, script + b"\0")
    closed_ns = time.monotonic_ns()
    os.close(fd)
    return closed_ns


def remove_job(spool: str, job_id: int) -> None:
    """Remove a job as slurmctld does when it forgets it."""
    directory = f"{spool}/hash.{job_id % 10}/job.{job_id}"
    os.unlink(f"{directory}/environment")
    os.unlink(f"{directory}/script")
    os.rmdir(directory)


def storm(
    spool: str,
    first: int,
    jobs: int,
    *,
    rate: float = 0.0,
    live_s: float = 0.0,
    burst: int = 1,
) -> dict[int, int]:
    """Write ``jobs`` jobs with ids from ``first``.

    Args:
        spool: The directory.
        first: The lowest id.
        jobs: How many.
        rate: Jobs a second; 0 for as fast as can be.
        live_s: Seconds after which each is removed again; 0 for never.
        burst: How many are written at once; the rate stays the same.

    Returns:
        When each was closed, in ns of CLOCK_MONOTONIC.
    """
    closed: dict[int, int] = {}
    alive: deque[tuple[float, int]] = deque()
    began = time.monotonic()
    for number in range(jobs):
        due = began + number // burst * burst / rate if rate else 0.0
        _remove_until(spool, alive, due)
        wait_s = due - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        job_id = first + number
        closed[job_id] = write_job(spool, job_id)
        if live_s:
            alive.append((time.monotonic() + live_s, job_id))
    _remove_until(spool, alive, float("inf"))
    return closed


def _remove_until(spool: str, alive: deque[tuple[float, int]], until: float) -> None:
    """Remove jobs whose time is over, waiting for those that end before ``until``."""
    while alive and (alive[0][0] <= until or alive[0][0] <= time.monotonic()):
        ends, job_id = alive.popleft()
        wait_s = ends - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        remove_job(spool, job_id)


def main() -> None:
    """Read the arguments, play, and write down when each script was closed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spool")
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=0.0, help="jobs a second, 0 for no limit")
    parser.add_argument("--live", type=float, default=0.0, help="seconds until it is removed")
    parser.add_argument("--burst", type=int, default=1, help="jobs written at once")
    parser.add_argument("--times", default="", help="file for when each script was closed")
    options = parser.parse_args()
    began_ns, cpu_s = time.monotonic_ns(), time.process_time()
    closed = storm(
        options.spool,
        options.first,
        options.jobs,
        rate=options.rate,
        live_s=options.live,
        burst=options.burst,
    )
    if options.times:
        told = {
            "began_ns": began_ns,
            "ended_ns": time.monotonic_ns(),
            "cpu_s": time.process_time() - cpu_s,
            "closed_ns": closed,
        }
        Path(options.times).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
