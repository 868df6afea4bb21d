#!/bin/sh
# Runs a command in a file system that consists of Debian's packages and the named directories,
# without the host's environment variables. The caller has created a mount and a PID namespace.
# Usage: inside.sh PACKAGES EMPTY-DIRECTORY [DIRECTORY PATH]... -- COMMAND...
set -eu
PATH=/usr/sbin:/usr/bin:/sbin:/bin
packages=$1 root=$2
shift 2

mount -t tmpfs none "$root"
for part in bin sbin lib lib64; do
    ln -s "usr/$part" "$root/$part"
done
mkdir "$root/usr" "$root/dev" "$root/proc" "$root/etc" "$root/tmp"
mount --bind "$packages/usr" "$root/usr"
mount --rbind /dev "$root/dev"
mount -t proc none "$root/proc"
while [ "$1" != -- ]; do
    mkdir -p "$root/$2"
    mount --bind "$1" "$root/$2"
    shift 2
done
shift
# Hide the sources of the standard library: if they are installed, the compiler writes their paths
# into the binary.
if [ -d "$root/opt/rust/lib/rustlib/src" ]; then
    mount -t tmpfs none "$root/opt/rust/lib/rustlib/src"
fi
exec env -i PATH=/opt/rust/bin:/usr/sbin:/usr/bin HOME=/tmp LC_ALL=C.UTF-8 TZ=UTC chroot "$root" "$@"
