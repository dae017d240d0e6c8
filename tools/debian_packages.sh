#!/usr/bin/env bash
# The Debian packages jaxpar uses: the real Fashion-MNIST files, the program that lays out its pictures, and a compiler for
# the kernels in cpu/.
# Installs what is missing where it can (root on Debian or Ubuntu); elsewhere prints the one command to type.
set -u
missing=()
[ -e /usr/share/datasets/fashion-mnist/train-images-idx3-ubyte.gz ] || missing+=(dataset-fashion-mnist)
# The picture of a step needs the engine nop2. From Graphviz 14 on, Debian has it in a package of its own.
engines=libgvplugin-neato-layout8
if ! command -v dot >/dev/null; then
  missing+=(graphviz)
  apt-cache show "$engines" >/dev/null 2>&1 && missing+=("$engines")
elif ! echo "graph {}" | dot -Knop2 -Tdot >/dev/null 2>&1; then
  missing+=("$engines")
fi
[ -n "${CXX:-}" ] || command -v g++ >/dev/null || command -v clang++ >/dev/null || missing+=(g++)
[ ${#missing[@]} -eq 0 ] && exit 0
if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  echo "installing Debian packages: ${missing[*]}"
  log=$(mktemp)
  { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"; } >"$log" 2>&1 && exit 0
  tail -n 3 "$log" >&2
fi
echo "not installed: ${missing[*]}. On Debian or Ubuntu:  sudo apt-get install ${missing[*]}" >&2
exit 0
