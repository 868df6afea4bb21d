# Makes a host and runs libvirtd on it: process 1 of a process namespace, in mount, UTS, IPC and
# network namespaces of its own. Arguments: the name, the folder with the unpacked packages, an empty
# folder for the host's file system, a UUID, the folder with configuration files.
#
# Prints its process ID, as the machine numbers it, when the file system is complete. Everything ends
# with process 1, and process 1 ends when its standard input does.
set -eu
export LC_ALL=C
name=$1 packages=$2 root=$3 uuid=$4 files=$5
read -r process rest </proc/self/stat

mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$root"
cd "$root"
mkdir dev proc root run srv sys tmp usr
chmod 1777 tmp
for link in bin sbin lib lib64; do ln -s "usr/$link" "$link"; done
mount --bind "$packages/usr" usr
mount -o remount,bind,ro usr
cp -R "$packages/etc" "$packages/var" .
cp -R "$files/." .
# The user of QEMU. Its number is the one that Debian's package takes.
chown 64055:64055 srv
chown -R 0:64055 etc/pki/qemu
chmod -R u=rwX,g=rX,o= etc/pki/qemu
mount -t proc proc proc
mount -t sysfs sysfs sys
mount -t tmpfs -o mode=755 tmpfs dev
mkdir dev/pts dev/shm
mount -t devpts -o newinstance,ptmxmode=0666 devpts dev/pts
ln -s pts/ptmx dev/ptmx
mount -t tmpfs -o mode=1777 tmpfs dev/shm
for device in null:3 zero:5 full:7 random:8 urandom:9; do
    mknod -m 666 "dev/${device%:*}" c 1 "${device#*:}"
done
if [ -e /dev/kvm ]; then mknod -m 666 dev/kvm c 10 232; fi
if [ -e /dev/userfaultfd ]; then mknod -m 666 dev/userfaultfd c $(stat -c '0x%t 0x%T' /dev/userfaultfd); fi
hostname "$name"
mkdir -p var/lib/libvirt var/log/libvirt run/lock
rm -rf var/run
ln -s ../run var/run

# Programs of the machine that are started on this host see its names, its users, its sockets and its
# state.
for file in hosts passwd group nsswitch.conf; do
    if [ -e "/etc/$file" ]; then mount --bind "etc/$file" "/etc/$file"; fi
done
mount --bind run /run
mount --bind var/lib /var/lib

trap 'exit 0' TERM
# The shell gives a background command another standard input, so copy it first.
exec 3<&0
{ while read -r line; do :; done; kill -TERM 1; } <&3 &
exec 3<&-
chroot . /usr/sbin/libvirtd --listen --config /etc/libvirt/libvirtd.conf \
    </dev/null >var/log/libvirt/output 2>&1 &
echo "$process"
exec >/dev/null
# Reap the orphans, too.
while :; do wait; done
