#!/bin/sh
# A low lane for KV cache over TCP (and Soft-RoCE), by the kernel's own queues: where no NIC or switch does it.
#
#   tc.sh [-n] DEV RATE [prio|ets|htb]    puts a queue of RATE in front of DEV, by default prio
#   tc.sh [-n] DEV undo                   takes it away: DEV has the kernel's default queue again
#   tc.sh DEV show                        queues and their counters
#
# -n prints the commands and runs none. RATE is a whole number with a unit of tc: 950mbit, 24gbit. It must be a little less than
# what the link really does: only the queue that is the bottleneck decides who goes first. Packets are told apart by DSCP:
#
#   model   DSCP 26 (traffic class 0x68)   first
#   others  all that is not marked         next: gRPC, heartbeats, ssh
#   KV      DSCP 8 (traffic class 0x20)    last: kvmoverd's transport.dscp, and the KV lane of its RDMA transport
#
#   prio    strictly in this order. KV gets nothing while model traffic fills RATE.
#   ets     model first; others and KV share what is left as 9 to 1. The shape of ../roce.
#   htb     strictly in this order, but each has a floor: model 98 %, others 1 %, KV 1 %. The shape of ../opensm: use it where
#           KV must never stand still.
#
# It needs root, and sch_tbf, sch_prio or sch_ets or sch_htb, cls_u32. One queue with one lock takes the place of a NIC's many:
# good for some 10 Gb/s. It acts on what leaves DEV, so run it on every node. A reboot forgets it.
set -eu

usage() {
    sed -n 's/^# \{0,1\}//; 2,7p' "$0" >&2
    exit 2
}

# Prints a command, and runs it but for -n.
run() {
    echo "+ $*"
    [ "$dry" = yes ] || "$@"
}

# Both families: the traffic class stands in the same bits, but the matches are two.
class_by_mark() { # PARENT CLASS TRAFFIC_CLASS
    run tc filter add dev "$dev" parent "$1" protocol ip prio 1 u32 match ip dsfield "$3" 0xfc flowid "$2"
    run tc filter add dev "$dev" parent "$1" protocol ipv6 prio 2 u32 match ip6 priority "$3" 0xfc flowid "$2"
}

# What is not marked goes to the second band: 1 in all places of the map, since bands count from 0.
middle="1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1"

bands() { # KIND OPTIONS...
    # The shaper makes the bottleneck. Its burst is 4 ms of RATE, but no less than some packets of the largest size.
    run tc qdisc add dev "$dev" root handle 1: tbf rate "$rate" burst "$burst" latency 50ms
    # shellcheck disable=SC2086 # each word is an argument
    run tc qdisc add dev "$dev" parent 1:1 handle 10: "$@" priomap $middle
    class_by_mark 10: 10:1 0x68
    class_by_mark 10: 10:3 0x20
}

leaf() { # CLASS PRIO FLOOR
    run tc class add dev "$dev" parent 1:9 classid "1:$1" htb rate "$3" ceil "$rate" prio "$2" burst "$burst" cburst "$burst"
    run tc qdisc add dev "$dev" parent "1:$1" pfifo limit 1000
}

classes() {
    run tc qdisc add dev "$dev" root handle 1: htb default 2
    run tc class add dev "$dev" parent 1: classid 1:9 htb rate "$rate" burst "$burst" cburst "$burst"
    leaf 1 0 "$((kbits * 98 / 100))kbit"
    leaf 2 1 "$((kbits / 100))kbit"
    leaf 3 7 "$((kbits / 100))kbit"
    class_by_mark 1: 1:1 0x68
    class_by_mark 1: 1:3 0x20
}

# 0 when the kernel's default queue is there already: nothing to undo is no error.
undo() {
    echo "+ tc qdisc del dev $dev root"
    [ "$dry" = yes ] || tc qdisc del dev "$dev" root 2>/dev/null || true
}

dry=no
if [ "${1-}" = -n ]; then
    dry=yes
    shift
fi
[ $# -ge 2 ] && [ $# -le 3 ] || usage
dev=$1 rate=$2 kind=${3-prio}
if [ "$dry" = no ] && [ ! -e "/sys/class/net/$dev" ] && ! ip link show dev "$dev" >/dev/null 2>&1; then
    echo "tc.sh: there is no interface $dev" >&2
    exit 1
fi
case $rate in
undo) undo && exit ;;
show) tc -s qdisc show dev "$dev" && tc -s class show dev "$dev" && exit ;;
esac

number=${rate%%[!0-9]*}
case $number/${rate#"$number"} in
/*) usage ;;
*/kbit) kbits=$number ;;
*/mbit) kbits=$((number * 1000)) ;;
*/gbit) kbits=$((number * 1000000)) ;;
*) usage ;;
esac
if [ "$kbits" -lt 1000 ]; then
    echo "tc.sh: RATE is $rate: must be 1mbit or more" >&2
    exit 2
fi
# Bytes of 4 ms: kbits * 1000 / 8 / 250.
burst=$((kbits / 2))
[ "$burst" -ge 16384 ] || burst=16384

case $kind in
prio) queue="bands prio bands 3" ;;
ets) queue="bands ets bands 3 strict 1 quanta 9000 1000" ;;
htb) queue=classes ;;
*) usage ;;
esac
# A half-made queue would misplace what it has no class for.
trap 'test $? = 0 || undo' EXIT
undo
$queue
