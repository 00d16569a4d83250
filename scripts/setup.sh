#!/bin/sh
# Installs what Steward needs on this machine: `setup.sh python slurm tests`, or any of the others below.
#
# The script skips installed parts silently. It installs Debian packages only as
# root, and Slurm's only where no other Slurm is; otherwise one line says what to
# install. Any user gets Python packages in .venv, and npm packages in node_modules.
set -eu

cd "$(dirname "$0")/.."
venv=.venv
python=${PYTHON:-python3}
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin:/opt/slurm/sbin:/opt/slurm/bin
export PATH

work=$(mktemp -d)
guard=
clean_up() {
    rm -rf "$work"
    [ -z "$guard" ] || rm -f "$guard"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

say() { printf '%s\n' "==> $*"; }
give_up() {
    printf '%s\n' "setup: $*" >&2
    exit 1
}
have() { command -v "$1" >/dev/null 2>&1; }

# follow PATTERN COMMAND...: runs a command, shows one line for each of its lines that begins
# with PATTERN, and all of its last lines where it fails.
follow() {
    pattern=$1
    shift
    {
        code=0
        "$@" </dev/null 2>&1 || code=$?
        echo "$code" >"$work/code"
    } | tee "$work/log" | sed -n "s/^$pattern \([^ ;<>=!~(]*\).*/    \1/p"
    if [ "$(cat "$work/code")" != 0 ]; then
        tail -n 20 "$work/log" >&2
        return 1
    fi
}

# apt WHY PACKAGE...: installs packages, their services kept from starting.
apt() {
    why=$1
    shift
    if [ "$(id -u)" != 0 ]; then
        give_up "$why: as root, apt-get install $*"
    fi
    if [ ! -e /usr/sbin/policy-rc.d ]; then
        guard=/usr/sbin/policy-rc.d
        printf '#!/bin/sh\nexit 101\n' >"$guard"
        chmod 755 "$guard"
    fi
    say "installing $* with apt-get; services are kept from starting"
    DEBIAN_FRONTEND=noninteractive
    export DEBIAN_FRONTEND
    follow 'Nothing' apt-get -q update || give_up "apt-get update failed"
    follow 'Setting up' apt-get -q -y install --no-install-recommends "$@" ||
        give_up "apt-get could not install $*"
    if [ -n "$guard" ]; then
        rm -f "$guard"
        guard=
    fi
}

# Whether this machine is part of a cluster, or keeps one.
has_own_slurm() {
    [ ! -e /etc/slurm/slurm.conf ] || return 0
    for comm in /proc/[0-9]*/comm; do
        case $(cat "$comm" 2>/dev/null || :) in
        slurmctld | slurmd | slurmdbd) return 0 ;;
        esac
    done
    return 1
}

need_slurm() {
    missing=
    for pair in slurmctld:slurmctld slurmd:slurmd sbatch:slurm-client munged:munge; do
        have "${pair%%:*}" || missing="$missing ${pair#*:}"
    done
    # What accounting is tested with: a database, and what the native parts are built with.
    if [ "$(id -u)" = 0 ] && have apt-get; then
        for pair in slurmdbd:slurmdbd mariadbd:mariadb-server cc:gcc lua5.1:lua5.1 valgrind:valgrind; do
            have "${pair%%:*}" || missing="$missing ${pair#*:}"
        done
        [ -e /usr/include/slurm/spank.h ] || missing="$missing libslurm-dev"
        # What job_submit.lua asks the gate through.
        set -- /usr/lib/*/lua/5.1/socket/unix.so
        [ -e "$1" ] || missing="$missing lua-socket"
        [ -e /usr/include/stdio.h ] || missing="$missing libc6-dev"
    fi
    [ -n "$missing" ] || return 0
    if has_own_slurm; then
        give_up "this machine has a Slurm of its own, so nothing is installed on it, but it lacks$missing: run this on another machine"
    fi
    if ! have apt-get; then
        give_up "no complete Slurm in PATH: install slurmctld, slurmd, the client commands and munge (EL: dnf install slurm-slurmctld slurm-slurmd slurm munge, from EPEL)"
    fi
    # shellcheck disable=SC2086 # one word a package
    apt "Slurm is needed" $missing
}

# Kafka, Elasticsearch and OpenSearch for the tests; the Python packages have to be there.
need_servers() {
    need_tests
    fill_venv servers requirements-servers.lock
    missing=
    for pair in mvn:maven java:openjdk-17-jre-headless openssl:openssl setpriv:util-linux; do
        have "${pair%%:*}" || missing="$missing ${pair#*:}"
    done
    "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libzstd.so.1")' 2>/dev/null ||
        missing="$missing libzstd1"
    if [ -n "$missing" ]; then
        have apt-get ||
            give_up "the servers that tests run against need Maven, Java 17 or later, openssl, setpriv and libzstd: install them"
        # shellcheck disable=SC2086 # one word a package
        apt "the servers that tests run against need more" $missing
    fi
    PYTHONPATH=tests "$venv/bin/python" -m servers.jars
}

# PostgreSQL for the tests, which start one of their own; Debian's keeps its programs out of PATH.
need_databases() {
    if have postgres || ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1; then
        return 0
    fi
    have apt-get || give_up "the ledger is tested on PostgreSQL: install its server"
    apt "the ledger is tested on PostgreSQL" postgresql
}

need_browser() {
    for name in chromium chromium-browser google-chrome; do
        ! have "$name" || return 0
    done
    have apt-get || give_up "the pages are tested in Chromium: install it"
    apt "the pages are tested in Chromium" chromium
}

need_debootstrap() {
    if have debootstrap || [ "$(id -u)" != 0 ]; then
        return 0 # without root there are no root directories, and the sandbox says so
    fi
    have apt-get || give_up "other versions of Slurm need debootstrap: install it"
    apt "other versions of Slurm need debootstrap" debootstrap
}

# From npm: htmx and uPlot for the pages, and axe-core, which tests their accessibility.
need_web() {
    vendor=src/steward/web/static/vendor
    wanted=$(cksum <package-lock.json)
    [ "$(cat "$vendor/.made" 2>/dev/null)" != "$wanted" ] || return 0
    if ! have npm; then
        have apt-get || give_up "the pages take scripts from npm: install Node.js with npm"
        apt "the pages take scripts from npm" npm
    fi
    say "installing the packages of package-lock.json with npm"
    npm ci --ignore-scripts --no-audit --no-fund --loglevel=error >"$work/npm" 2>&1 || {
        tail -n 20 "$work/npm" >&2
        give_up "npm could not get the packages of package-lock.json"
    }
    rm -rf "$vendor"
    mkdir -p "$vendor"
    cp node_modules/htmx.org/dist/htmx.min.js node_modules/uplot/dist/uPlot.iife.min.js \
        node_modules/uplot/dist/uPlot.min.css "$vendor/"
    cp node_modules/htmx.org/LICENSE "$vendor/htmx.LICENSE"
    cp node_modules/uplot/LICENSE "$vendor/uPlot.LICENSE"
    echo "$wanted" >"$vendor/.made"
}

# What makes packages, and what they are tested with.
need_dist() {
    missing=
    for pair in dpkg-deb:dpkg rpmbuild:rpm cpio:cpio git:git; do
        have "${pair%%:*}" || missing="$missing ${pair#*:}"
    done
    if [ "$(id -u)" = 0 ] && have apt-get; then
        for pair in mandoc:mandoc zsh:zsh fish:fish systemd-analyze:systemd objdump:binutils; do
            have "${pair%%:*}" || missing="$missing ${pair#*:}"
        done
    fi
    [ -n "$missing" ] || return 0
    have apt-get || give_up "packages are made by dpkg-deb and rpmbuild: install dpkg and rpm-build"
    # shellcheck disable=SC2086 # one word a package
    apt "packages are made, and tested, with more" $missing
}

need_python() {
    have "$python" || give_up "$python is not there: install Python 3.11 or later, or set PYTHON"
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        give_up "$python is $("$python" -V 2>&1): Python 3.11 or later is needed; set PYTHON to one"
    identity=$("$python" -c 'import os, sys; print(sys.version, sys.base_prefix, os.getcwd())' |
        tr '\n' ' ')
    made=$venv/steward-python
    if ! "$venv/bin/python" -c "import pip" 2>/dev/null ||
        [ "$(cat "$made" 2>/dev/null)" != "$identity" ]; then
        make_venv
        printf '%s' "$identity" >"$made"
    fi
    fill_venv packages requirements.lock pyproject.toml
}

# The drivers of optional parts: Kafka, Parquet, PostgreSQL.
need_parts() {
    fill_venv parts requirements-parts.lock
}

# What Steward is tested and packaged with.
need_tests() {
    need_parts
    fill_venv tests requirements-tests.lock
}

# What the documentation site is built with.
need_site() {
    need_tests
    fill_venv site requirements-site.lock
}

make_venv() {
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        have apt-get || give_up "$python cannot make virtual environments: install its venv module"
        apt "Python's venv module is needed" python3-venv
    fi
    say "making $venv with $("$python" -V)"
    "$python" -m venv --clear "$venv" || give_up "$python could not make $venv"
}

# fill_venv NAME LOCK [PROJECT]: installs the packages of a lock file, and Steward with its
# project file, unless that was done for these files.
fill_venv() {
    filled=$venv/steward-$1
    lock=$2
    shift
    packages=$("$python" -c '
import hashlib, sys
digest = hashlib.sha256()
for name in sys.argv[1:]:
    with open(name, "rb") as file:
        digest.update(file.read())
print(digest.hexdigest())' "$@")
    [ "$(cat "$filled" 2>/dev/null)" != "$packages" ] || return 0
    say "installing the packages of $lock into $venv"
    pip="$venv/bin/python -m pip --disable-pip-version-check --no-input"
    # shellcheck disable=SC2086 # several words
    follow Collecting $pip install --require-hashes -r "$lock" ||
        give_up "pip could not install the packages of $lock"
    if [ $# -gt 1 ]; then
        # shellcheck disable=SC2086 # several words
        follow Nothing $pip install --no-deps --no-build-isolation -e . ||
            give_up "pip could not install Steward itself"
    fi
    echo "$packages" >"$filled"
}

for need in "$@"; do
    case $need in
    python) need_python ;;
    parts) need_parts ;;
    tests) need_tests ;;
    site) need_site ;;
    slurm) need_slurm ;;
    servers) need_servers ;;
    databases) need_databases ;;
    debootstrap) need_debootstrap ;;
    dist) need_dist ;;
    web) need_web ;;
    browser) need_browser ;;
    *) give_up "usage: scripts/setup.sh [python] [parts] [tests] [site] [web] [browser] [slurm] [servers] [databases] [debootstrap] [dist]" ;;
    esac
done
