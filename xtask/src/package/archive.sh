#!/bin/sh
# Makes a Debian package and an archive of a tree. Their bytes depend on the files, their modes and EPOCH.
# Usage: archive.sh TREE OUT xz|none NAME EPOCH
set -eu
tree=$1 out=$2 compression=$3 name=$4 epoch=$5
export LC_ALL=C SOURCE_DATE_EPOCH="$epoch"
umask 022
cd "$tree"

# -n: without the name and the time of the file.
gzip -9n usr/share/man/man1/*.1 usr/share/doc/dunlin/changelog usr/share/doc/dunlin/changelog.Debian \
    usr/share/doc/dunlin/licences
# dpkg has checksums of its own for the configuration.
find usr -type f | sort | xargs md5sum >DEBIAN/md5sums
# KiB, with each file and folder rounded up.
size=$(find usr etc -printf '%s %y\n' | {
    sum=0
    while read -r bytes kind; do
        [ "$kind" = f ] || bytes=1024
        sum=$((sum + (bytes + 1023) / 1024))
    done
    echo "$sum"
})
sed -i "/^Depends:/i Installed-Size: $size" DEBIAN/control
find . -exec touch --no-dereference --date="@$epoch" {} +

dpkg-deb --root-owner-group -Z"$compression" --threads-max=1 --build . "$out/$name.deb" >/dev/null
set -- --create --format=gnu --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$epoch" \
    --transform="s,^\\.,$name," --exclude=./DEBIAN .
case $compression in
xz) tar "$@" | xz --threads=1 >"$out/$name.tar.xz" ;;
none) tar "$@" >"$out/$name.tar" ;;
esac
