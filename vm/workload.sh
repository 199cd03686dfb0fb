#!/bin/sh
# What `cargo vm run stageNN` starts beside a stage, so that there is something to see:
# a few tens of I/Os a second on the ext4 data disk, of the kinds that the stages tell
# apart. It ends with the stage; --idle leaves it out.
[ -e /run/bpf-vm ] || exit 1 # on a host, /mnt/data may hold what somebody needs
cd /mnt/data || exit 1
dd if=/dev/zero of=file bs=1M count=16 conv=fsync 2>/dev/null || exit 1

n=0
while :; do
	# Past the page cache: reads and writes of 4 KiB, submitted by dd itself.
	dd if=file of=/dev/null bs=4k count=24 skip=$((n * 97 % 4000)) iflag=direct 2>/dev/null
	dd if=/dev/zero of=file bs=4k count=8 seek=$((n * 61 % 4000)) oflag=direct conv=notrunc 2>/dev/null
	# Through it: a write that fsync brings to the disk, with its journal entry.
	dd if=/dev/zero of=log bs=16k count=1 conv=fsync 2>/dev/null
	# The cache is told to forget the file; the same 64 KiB then come once from the disk
	# and once from the cache.
	dd if=file iflag=nocache count=0 2>/dev/null
	dd if=file of=/dev/null bs=64k count=1 skip=$((n % 256)) 2>/dev/null
	dd if=file of=/dev/null bs=64k count=1 skip=$((n % 256)) 2>/dev/null
	n=$((n + 1))
	sleep 0.3
done
