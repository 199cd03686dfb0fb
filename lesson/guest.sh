#!/bin/bash
# The program of the guest that `cargo lesson check` keeps: runs each script that appears as
# DIR/request, and ends when DIR/stop appears or after IDLE seconds without a request.
dir=$1
idle=$2
mkfifo /run/lesson
exec 3<>/run/lesson
: >"$dir/ready"
last=$SECONDS
while [ ! -e "$dir/stop" ] && ((SECONDS - last < idle)); do
	if [ -e "$dir/request" ]; then
		mv "$dir/request" "$dir/running"
		bash "$dir/running" >"$dir/output" 2>"$dir/errors"
		echo $? >"$dir/result"
		rm "$dir/running"
		mv "$dir/result" "$dir/status"
		last=$SECONDS
	else
		# A pause without a new process: nobody writes to this pipe.
		read -r -t 0.3 -u 3
	fi
done
