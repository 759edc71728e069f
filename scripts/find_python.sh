#!/bin/sh
# Print the path of a Python that works, or one line on stderr about what is missing.
#
#   find_python.sh 3.14 3.13 3.12      versions in the order of preference
#
# A name on PATH may be a shim that only says that the version is not active (pyenv), and a distribution may split off
# venv, so each candidate has to run and to import what `python -m venv` needs. The versions that pyenv has installed
# are tried after PATH, in the same order of preference.
# Prints the real executable behind a working candidate, so that a later change of pyenv's active version does no harm.
real() {
    "$1" -c "import sys, ensurepip, venv, ssl
if '.'.join(map(str, sys.version_info[:2])) != '$2': sys.exit(1)
print(sys.executable)" 2>/dev/null
}

for version in "$@"; do
    for candidate in "python$version" python3; do
        path=$(command -v "$candidate" 2>/dev/null) || continue
        real "$path" "$version" && exit 0
    done
done
for version in "$@"; do
    for root in "${PYENV_ROOT:-$HOME/.pyenv}/versions" "$HOME/.pyenv/versions"; do
        # Newest patch release first.
        for home in $(ls -d "$root/$version".* 2>/dev/null | sort -rV); do
            real "$home/bin/python" "$version" && exit 0
        done
    done
done
echo "No working Python $* with venv found on PATH or in pyenv: install one (for example python3.12 and python3.12-venv), or pass PYTHON=/path/to/python." >&2
exit 1
