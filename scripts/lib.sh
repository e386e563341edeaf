# What do the scripts beside this file share? Sourced by them, never run.
# shellcheck shell=bash

# The repository root: every artefact goes into a git-ignored folder there.
# shellcheck disable=SC2034
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)

# For people: stdout is kept for what a caller evaluates.
note() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

# Nothing to offer on this machine: say why and leave with the "skipped" status.
skip() { note "$*"; exit 3; }

# Runs a command silently; shows the end of its output only when it fails.
quiet() {
    local log status=0
    log=$(mktemp)
    "$@" >"$log" 2>&1 </dev/null || status=$?
    if [ "$status" -ne 0 ]; then tail -n 5 "$log" >&2; fi
    rm -f "$log"
    return "$status"
}

as_root() { if [ "$(id -u)" -eq 0 ]; then "$@"; else sudo -n "$@"; fi; }

# Debian and Ubuntu: installs packages; a stale package list is refreshed once.
apt_install() {
    note "installing $* with apt"
    local install=(as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq -y
        -o DPkg::Lock::Timeout=120 install --no-install-recommends "$@")
    "${install[@]}" >/dev/null 2>&1 </dev/null && return
    quiet as_root apt-get -qq update || true
    quiet "${install[@]}"
}

# Whichever pip this machine has; fails when it has none.
pip_run() {
    local pip
    for pip in "python3 -m pip" pip3 pip; do
        # shellcheck disable=SC2086
        if $pip --version >/dev/null 2>&1; then
            quiet $pip --disable-pip-version-check "$@"
            return
        fi
    done
    note "no pip here"
    return 1
}
