#!/bin/sh
# What `cargo vm run stageNN` starts beside a stage, so that there is something to see:
# a few tens of I/Os a second on the ext4 data disk, of the kinds that the stages tell
# apart. It ends with the stage; --idle leaves it out.
cd /mnt/data || exit 1
dd if=/dev/zero of=file bs=1M count=16 conv=fsync 2>/dev/null || exit 1

n=0
while :; do
	# Past the page cache: four reads and a write of 4 KiB, submitted by dd itself.
	dd if=file of=/dev/null bs=4k count=4 skip=$((n * 97 % 4096)) iflag=direct 2>/dev/null
	dd if=/dev/zero of=file bs=4k count=1 seek=$((n * 61 % 4096)) oflag=direct conv=notrunc 2>/dev/null
	# Through it: a write that fsync brings to the disk, with its journal entry.
	dd if=/dev/zero of=log bs=16k count=1 conv=fsync 2>/dev/null
	# The same 64 KiB twice: once from the disk (the cache is told to forget them), once
	# from the cache.
	at=$((n % 256))
	dd if=file of=/dev/null bs=64k count=0 skip=$at iflag=nocache 2>/dev/null
	dd if=file of=/dev/null bs=64k count=1 skip=$at 2>/dev/null
	dd if=file of=/dev/null bs=64k count=1 skip=$at 2>/dev/null
	n=$((n + 1))
	sleep 0.3
done
