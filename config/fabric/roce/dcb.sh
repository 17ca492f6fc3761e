#!/bin/sh
# The lane of KV cache on a RoCE v2 network, at a host's port: by dcb of iproute2 (5.11 or newer), on any NIC whose driver has the
# kernel's DCB interface (mlx5, bnxt, ice, ...). The same settings as mlnx_qos.sh beside this, where they are explained.
#
#   dcb.sh [-n] [-f PERCENT] DEV    sets DEV up
#   dcb.sh [-n] DEV undo            no map, no PFC, queues by the driver; not what was there before
#   dcb.sh DEV show                 what the port has now, with its counters of pause frames
#
# -n prints the commands and runs none. -f gives KV a floor, 1 to 49: the model's class is then no longer strictly first, but has
# a share like the others: KV PERCENT, other traffic 1, model the rest. Nothing here outlives a reboot. Not yet run on hardware.
set -eu

usage() {
    sed -n 's/^# \{0,1\}//; 2,8p' "$0" >&2
    exit 2
}

run() {
    echo "+ $*"
    [ "$dry" = yes ] || "$@"
}

setup() {
    # The host decides, by the IEEE's version of DCB, and takes nothing over from the switch.
    run dcb dcbx set dev "$dev" host ieee
    # With rules for DSCP the driver trusts DSCP instead of the VLAN tag. KV 8, model 26, CNPs 48.
    run dcb app replace dev "$dev" dscp-prio 8:1 26:3 48:6
    # Queues and turns in one command, as they are checked together: shares of the ets queues must add up to 100.
    # shellcheck disable=SC2086 # each word is an argument
    run dcb ets set dev "$dev" willing off prio-tc 0:1 1:0 2:1 3:3 4:4 5:5 6:6 7:7 tc-tsa $turns tc-bw $shares
    run dcb pfc set dev "$dev" prio-pfc all:off 1:on 3:on
}

undo() {
    run dcb pfc set dev "$dev" prio-pfc all:off
    run dcb ets set dev "$dev" prio-tc 0:1 1:0 2:2 3:3 4:4 5:5 6:6 7:7 tc-tsa all:vendor tc-bw all:0
    run dcb app del dev "$dev" dscp-prio 8:1 26:3 48:6
}

show() {
    run dcb app show dev "$dev"
    run dcb ets show dev "$dev"
    run dcb -s pfc show dev "$dev"
}

dry=no floor=
while getopts nf: option; do
    case $option in
    n) dry=yes ;;
    f) floor=$OPTARG ;;
    *) usage ;;
    esac
done
shift $((OPTIND - 1))
[ $# -ge 1 ] && [ $# -le 2 ] || usage
dev=$1 what=${2-setup}
if [ "$dry" = no ] && [ ! -e "/sys/class/net/$dev" ]; then
    echo "dcb.sh: there is no interface $dev" >&2
    exit 1
fi
case $floor in
"") turns="all:strict 0:ets 1:ets" shares="all:0 0:10 1:90" ;;
[1-9] | [1-4][0-9]) turns="all:strict 0:ets 1:ets 3:ets" shares="all:0 0:$floor 1:1 3:$((99 - floor))" ;;
*) echo "dcb.sh: -f $floor: must be 1 to 49" >&2 && exit 2 ;;
esac
case $what in
setup | undo | show) "$what" ;;
*) usage ;;
esac
