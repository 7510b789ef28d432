#!/bin/busybox sh
# First process of the guest: mounts the host's files with a layer in memory over them, and runs /job/job.sh there.
# Its output goes to the host through one virtio port, and its exit code through another one.
B=/bin/busybox
export PATH=/bin
for d in proc sys dev lower rw new; do $B mkdir -p /$d; done
$B mount -t proc proc /proc
$B mount -t sysfs sysfs /sys
$B mount -t devtmpfs dev /dev
echo 0 > /proc/sys/kernel/printk
for m in /modules/*.ko; do $B insmod $m || echo "insmod $m failed"; done

i=0 # the ports come a moment after their driver
until [ -n "$JOB" ] && [ -n "$STATUS" ] || [ $i -gt 400 ]; do
    for p in /sys/class/virtio-ports/*; do
        case $($B cat $p/name 2>/dev/null) in
            job) JOB=/dev/${p##*/} ;;
            status) STATUS=/dev/${p##*/} ;;
        esac
    done
    i=$((i + 1)); $B sleep 0.05
done
# QEMU ends with the machine: a moment for what it has still to write
end() { echo "$1" > $STATUS; $B sleep 1; $B reboot -f; }
fail() { end "cannot $1"; }

share() { $B mount -t virtiofs -o ro "$1" "$2" || fail "mount $1 at $2"; }
share root /lower
$B mount -t tmpfs -o size=60%,mode=755 rw /rw
$B mkdir /rw/up /rw/work
$B mount -t overlay -o lowerdir=/lower,upperdir=/rw/up,workdir=/rw/work overlay /new || fail "mount the overlay"
while read -r tag folder; do
    [ "$folder" = / ] || { $B mkdir -p "/new$folder"; share "$tag" "/new$folder"; }
done < /job/shares
for d in proc sys dev tmp run; do $B mkdir -p /new/$d; done
$B mount -t proc proc /new/proc
$B mount -t sysfs sysfs /new/sys
$B mount -t devtmpfs dev /new/dev
$B mount -t tmpfs -o mode=755 run /new/run
$B mkdir -p /new/dev/shm
$B mount -t tmpfs -o mode=1777 shm /new/dev/shm
$B ln -sf /proc/self/fd /new/dev/fd
$B ln -sf /proc/self/fd/1 /new/dev/stdout
$B ln -sf /proc/self/fd/2 /new/dev/stderr
$B ip link set lo up 2>/dev/null
$B hostname numavm
$B cp /job/job.sh /new/run/job.sh

# one process only may have a port open, so the job writes to a pipe
{ $B chroot /new /bin/sh /run/job.sh < /dev/null; echo $? > /code; } 2>&1 | $B cat > $JOB
end "exit $($B cat /code)"
