#!/bin/sh
# What `make` installs with. Each step prints a line; what goes wrong, its cause and the fix.
#
#   sh tools/install.sh environment PYTHON FOLDER              a virtual environment
#   sh tools/install.sh packages PYTHON WHAT PIP-ARGUMENTS..   install into that of PYTHON
#
# NEEDED_MB: free space without which nothing is begun.
set -eu

NEEDED_MB=${NEEDED_MB:-2500}

fail() {
  echo "isoshard: $1" >&2
  echo "  $2" >&2
  exit 1
}

enough_space() {
  free=$(df -Pm "$1" | awk 'NR == 2 { print $4 }')
  [ "$free" -ge "$NEEDED_MB" ] || fail "$free MB are free at $1, $NEEDED_MB MB are needed." \
    "Make room, or work where there is some: torch and jax take 1.6 GB, torch's CUDA build 6 GB more."
}

environment() {
  python=$1 folder=$2
  "$python" -c '' 2>/dev/null || fail "there is no Python at PYTHON=$python." \
    "Install Python >= 3.11 (Debian: apt install python3 python3-venv), or name one: make PYTHON=/path/to/python3.12 .."
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail \
    "Python >= 3.11 is needed, but PYTHON=$python is: $("$python" --version 2>&1)." \
    "Name another one: make PYTHON=python3.12 .."
  enough_space .
  echo "making $folder with $("$python" --version 2>&1) .."
  "$python" -m venv "$folder" || { rm -rf "$folder"; fail "$python cannot make a virtual environment." \
    "What it says is above. Debian has this apart: apt install python3-venv"; }
  # That of Python 3.11 takes 40 seconds more to choose packages. Without a network it serves.
  "$folder/bin/python" -m pip --disable-pip-version-check install --quiet --upgrade pip 2>/dev/null ||
    echo "pip stays at $("$folder/bin/python" -m pip --version | cut -d ' ' -f 2): a newer one cannot be fetched"
}

packages() {
  python=$1 what=$2
  shift 2
  enough_space .
  log=$(mktemp)
  trap 'rm -f "$log"' EXIT
  echo "installing $what .."
  begun=$(date +%s)
  # Without compiled files of modules that nobody imports: they take a minute. Python writes the others.
  if PYTHONWARNINGS="ignore:Editable installation" "$python" -m pip --disable-pip-version-check \
    install --quiet --no-compile "$@" >"$log" 2>&1; then
    cat "$log"
    echo "installed in $(($(date +%s) - begun)) s"
    return
  fi
  cat "$log" >&2
  case $(cat "$log") in
    *"No space left on device"*) fail "the disk is full." \
      "Make room where .venv is and in the folder of TMPDIR (${TMPDIR:-/tmp}), where pip unpacks." ;;
    *NewConnectionError* | *NameResolutionError* | *ConnectTimeout* | *"Connection refused"* | *ProxyError*) fail \
      "no package index can be reached." \
      "Connect, set HTTPS_PROXY, or name a mirror or a folder of wheels: PIP_INDEX_URL=.., PIP_FIND_LINKS=.. PIP_NO_INDEX=1" ;;
    *) fail "pip cannot install $what." "What it says is above; once it is mended, the same command goes on." ;;
  esac
}

"$@"
