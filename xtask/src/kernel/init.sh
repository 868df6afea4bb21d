#!/rig/busybox sh
# The first process inside the virtual machine. It runs the tests that /rig/run
# lists ("NAME LIMIT-SECONDS" a line), each in network and mount namespaces of
# its own, reports over one virtio port and sends the tests' files over another.
# Its own lines begin with a token that the host generated. They also go to the
# kernel's log, which assigns a kernel warning to the test that caused it.
export PATH=/usr/sbin:/usr/bin:/rig/bin HOME=/root LC_ALL=C RUST_BACKTRACE=1
mount -t proc none /proc
mount -t sysfs none /sys
mount -t devtmpfs none /dev
mkdir -p /dev/pts /dev/shm /tmp /run /root /out
mount -t devpts none /dev/pts
mount -t tmpfs none /dev/shm
mount -t tmpfs none /tmp
mount -t tmpfs none /run
mount -t tmpfs none /out
mount -t debugfs none /sys/kernel/debug
mount -t tracefs none /sys/kernel/tracing
echo rig >/proc/sys/kernel/hostname
ip link set lo up

for word in $(cat /proc/cmdline); do
    case $word in
    rig.token=*) token=${word#*=} ;;
    rig.shell) shell=1 ;;
    rig.counting) export RIG_COUNTING=1 ;;
    rig.soak) export DUNLIN_SOAK=1 ;;
    esac
done

if [ -n "$shell" ]; then
    echo "Linux $(uname -r). The tests are in /rig/tests; leave with \"poweroff -f\" or by exit."
    cd /rig/tests
    setsid cttyhack sh
    poweroff -f
fi

# These are modules up to Linux 6.1. Later kernels have them built in.
modprobe -a virtio_pci virtio_console 2>/dev/null

# The kernel registers the ports some time after it has started this process.
port() { # name
    while :; do
        for known in /sys/class/virtio-ports/*; do
            if [ "$(cat "$known/name" 2>/dev/null)" = "$1" ]; then
                echo "/dev/${known##*/}"
                return
            fi
        done
        sleep 0.05
    done
}
exec 3>"$(port report)" 4>"$(port files)"

say() {
    echo "$token $*" >&3
    echo "$token $*" >/dev/kmsg
}

# The state that a test must restore, because the next one runs in the same
# machine: settings, CPUs, swap.
settings() {
    for file in /proc/sys/kernel/modprobe /proc/sys/kernel/hostname \
        /proc/sys/vm/nr_hugepages /proc/sys/vm/overcommit_memory /proc/sys/vm/swappiness \
        /sys/kernel/mm/transparent_hugepage/enabled /sys/devices/system/cpu/online; do
        [ -r "$file" ] && read -r value <"$file" && echo "$file is $value"
    done
    while read -r swap _; do
        echo "swap is $swap"
    done </proc/swaps
}

modules() {
    while read -r module _; do
        echo "$module"
    done </proc/modules
}

# Prints each setting that the test did not restore, one per line. Additional
# modules do not count.
changed() { # settings and modules before
    settings >/run/settings
    echo "$1" | grep -v -x -F -f /run/settings | sed 's/$/, no more/'
    echo "$1" >/run/before
    grep -v -x -F -f /run/before /run/settings
    for module in $2; do
        [ -e "/sys/module/$module" ] || echo "without the module $module"
    done
}

# shellcheck disable=SC2016 # the inner shell expands its own arguments
inner='/rig/bin/ip link set lo up; cd "/out/$1"; exec "/rig/tests/$1"'

say ready "$(uname -r)"
while read -r name limit; do
    mkdir -p "/out/$name"
    settings=$(settings)
    modules=$(modules)
    say begin "$name"
    unshare -n -m sh -c "$inner" sh "$name" </dev/null >&3 2>&3 3>&- 4>&- &
    test=$!
    (
        sleep "$limit"
        : >/run/late
        # The kernel logs the stacks of blocked tasks.
        echo w >/proc/sysrq-trigger
        kill -KILL "$test"
    ) &
    wait "$test"
    code=$?
    # Kill the processes that the test left running, and the process that enforces
    # the limit.
    kill -KILL -1
    wait
    if [ -e /run/late ]; then
        code=late
        rm /run/late
    fi
    left=$(changed "$settings" "$modules")
    if [ -n "$left" ]; then
        echo "$left" | sed 's/^/the machine was left changed: /' >&3
        case $code in 0 | 77) code=changed ;; esac
    fi
    if [ -n "$(ls -A "/out/$name")" ]; then
        tar -c -C /out "$name" >&4
    fi
    rm -rf "/out/${name:?}"
    say end "$name" "$code" "$(cat /proc/sys/kernel/tainted)"
    # The remaining tests run in another boot.
    [ -z "$left" ] || break
done </rig/run
say done
poweroff -f
