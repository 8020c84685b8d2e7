#!/bin/sh
# Makes /opt/venv from a lock, during an image build: install.sh LOCK [--without-cuda | --system-site-packages]
#
# --without-cuda          for indexes whose torch is a CUDA build: leaves out NVIDIA's libraries, which a CPU never runs
# --system-site-packages  puts the environment in front of the base image's own packages, which stay as they are
set -eu
lock=$1
mode=${2:-}
if [ -f /run/secrets/package-index ]; then set -a; . /run/secrets/package-index; set +a; fi
export UV_CACHE_DIR=/var/cache/uv UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never

case $mode in
  --system-site-packages) python3 -m venv --without-pip --system-site-packages /opt/venv ;;
  *) python3 -m venv --without-pip /opt/venv ;;
esac
site=$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo /opt/app >"$site/hpu-inference.pth"

if [ "$mode" = --without-cuda ]; then
  /opt/venv/bin/python /images/without_cuda.py lock "$lock" >/tmp/lock.txt
  /opt/tools/bin/uv pip sync --quiet --python /opt/venv/bin/python --require-hashes /tmp/lock.txt
  rm /tmp/lock.txt
  /opt/venv/bin/python /images/without_cuda.py libraries "$site"
else
  /opt/tools/bin/uv pip sync --quiet --python /opt/venv/bin/python --require-hashes "$lock"
fi
# Bytecode that is used whatever the file dates say: nobody can write newer one where the image runs. Files that are not for
# this Python do not compile, and nothing imports them.
/opt/venv/bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash "$site" || true
