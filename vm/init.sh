#!/bin/busybox sh
# /init of the guest: loads the modules, puts the guest's root together from the host's
# root and a tmpfs, mounts what the stages need, and hands over to the agent.
#
# The launcher shares three things over 9p, or over virtiofs with kernels that have no 9p: its
# root (read-only), the workspace (and the target directory, if that is elsewhere), and its run
# directory with the file `conf`: one `key value` a line. Where the guest has a root of its own, that
# is shared in the place of the launcher's, and the kernel's modules beside it.

/bin/busybox --install -s /bin
export PATH=/bin
R=/root
P9=trans=virtio,version=9p2000.L,msize=512000

# A step that fails ends the guest; the launcher shows the console's last lines.
fail() {
	echo "vm: guest init: $*" >/dev/console
	[ -e /ctl/conf ] && echo "$*" >/ctl/failed
	poweroff -f
	sleep 60
}
try() { "$@" 2>/tmp.err || fail "$*: $(cat /tmp.err)"; }
# conf KEY: the values of a key
conf() { while IFS= read -r line; do case $line in "$1 "*) echo "${line#* }" ;; esac; done </conf; }
# each KEY COMMAND: runs it for every value
each() { conf "$1" | while IFS= read -r value; do "$2" "$value"; done; }

mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev
for m in /mods/*.ko; do
	# The accelerated twins of a module may refuse this CPU.
	insmod "$m" 2>/tmp.err || case $m in *_intel.ko) ;; *) fail "insmod $m: $(cat /tmp.err)" ;; esac
done

# attach TAG DIRECTORY CACHE [,OPTION]: mounts what the launcher shares
if grep -qw 9p /proc/filesystems; then
	attach() { try mount -t 9p -o "$P9,cache=$3$4" "$1" "$2"; }
else
	attach() { try mount -t virtiofs -o "rw$4" "$1" "$2"; }
fi
attach ctl /ctl none
cat /ctl/conf >/conf # the shell reads byte by byte, over 9p that takes seconds
cut -d' ' -f1 /proc/uptime >/ctl/up # the launcher waits for this: the guest lives

# The host's root below, what the guest writes above, gone with the guest.
attach hostroot /lower loose ,ro
try mount -t tmpfs -o size=70% up /up
mkdir /up/upper /up/work
try mount -t overlay -o lowerdir=/lower,upperdir=/up/upper,workdir=/up/work root $R

mkdir -p $R/proc $R/sys $R/dev $R/run $R/mnt/data
try mount -t proc proc $R/proc
try mount -t sysfs sysfs $R/sys
try mount -t devtmpfs dev $R/dev
mkdir -p $R/dev/pts $R/dev/shm
try mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts $R/dev/pts
try mount -t tmpfs shm $R/dev/shm
ln -sf /proc/self/fd $R/dev/fd
for n in 0:stdin 1:stdout 2:stderr; do ln -sf /proc/self/fd/${n%:*} $R/dev/${n#*:}; done
try mount -t tracefs tracefs $R/sys/kernel/tracing
try mount -t debugfs debugfs $R/sys/kernel/debug
try mount -t bpf bpf $R/sys/fs/bpf
try mount -t cgroup2 cgroup2 $R/sys/fs/cgroup
try mount -t tmpfs run $R/run
mkdir -p $R/run/vm $R/run/lock

share() {
	tag=${1%% *} dir=$R${1#* }
	mkdir -p "$dir" || fail "cannot create ${1#* } in the guest"
	attach "$tag" "$dir" none
}
each share share
# What the launcher keeps for itself: consoles, logs and sockets of all guests of its user.
hide() { [ ! -d "$R$1" ] || try mount -t tmpfs -o ro,mode=700 hidden "$R$1"; }
each hide hide
try mount --bind /ctl $R/run/vm

# modprobe in the guest finds the modules of the guest's kernel.
V=$(uname -r)
mkdir -p $R/lib/modules
try mount -t tmpfs modules $R/lib/modules
mkdir $R/lib/modules/$V
modules=$(conf modules)
if [ -n "$modules" ]; then
	try mount --bind "/lower$modules" $R/lib/modules/$V
else
	attach modules $R/lib/modules/$V loose ,ro
fi
# The host's modprobe, not that of busybox, which reads no compressed modules.
load() { chroot $R /sbin/modprobe "$1" 2>/tmp.err || fail "modprobe $1: $(cat /tmp.err)"; }
each modprobe load

# The agent's binary, wherever it lies on the host. By way of the host's root, it is cached.
: >$R/run/vm-agent
agent=$(conf agent)
try mount --bind "${agent:+/lower}${agent:-/ctl/agent}" $R/run/vm-agent

# nvme and SCSI disks appear some time after their driver.
await() {
	n=0
	while [ ! -b "/dev/$1" ]; do
		n=$((n + 1))
		[ $n -lt 200 ] || fail "the disk /dev/$1 does not appear"
		sleep 0.1
	done
}
each disk await

# The data disk, found by its serial: which letter it has depends on the other disks.
data=
for s in /sys/block/vd*/serial; do
	[ "$(cat $s)" = bpfvm-data ] && data=/dev/$(basename ${s%/serial})
done
[ -n "$data" ] || fail "the data disk is not there"
# ext4 would read its block bitmaps at some instant of the first 5 s (ext4_register_li_request()):
# I/O that nobody asked for.
try mount -t ext4 -o no_prefetch_block_bitmaps "$data" $R/mnt/data

ip link set lo up
hostname bpf-vm
echo "$V" >$R/run/bpf-vm # this file marks the inside
chroot $R /run/vm-agent agent </dev/null >/dev/console 2>&1 || fail "the agent ended with $?"
poweroff -f
