#!/bin/sh
# The lane of KV cache on a RoCE v2 network, at a host's port of an NVIDIA ConnectX or BlueField: by mlnx_qos (package mlnx-tools).
#
#   mlnx_qos.sh [-n] [-f PERCENT] DEV    sets DEV up
#   mlnx_qos.sh [-n] DEV undo            the driver's own settings again, not those that were there before
#   mlnx_qos.sh DEV show                 what the port has now
#
# -n prints the commands and runs none. -f gives KV a floor, 1 to 49: the model's class is then no longer strictly first, but has
# a share like the others: KV PERCENT, other traffic 1, model the rest. DEV is the Ethernet interface of the RDMA device
# (`rdma link`). dcb.sh beside this does the same with iproute2, on any NIC. Nothing here outlives a reboot.
#
#   what       DSCP  class  priority  queue  turn
#   CNPs         48   0xc0         6      6  strictly first: what makes senders slow down must get through
#   model        26   0x68         3      3  strictly next; lossless
#   others        -      -       0,2      1  share of what is left: 90 %
#   KV            8   0x20         1      0  share of what is left: 10 %; lossless
#
# Switches must have the same map, queues and PFC; this is the host's half only. docs/fabric.md. Not yet run on hardware.
set -eu

usage() {
    sed -n 's/^# \{0,1\}//; 2,7p' "$0" >&2
    exit 2
}

run() {
    echo "+ $*"
    [ "$dry" = yes ] || "$@"
}

setup() {
    # The host's settings count, not what the firmware hears from the switch by DCBX.
    run mlnx_qos -i "$dev" -d os
    # Packets are told apart by DSCP, not by the VLAN tag that a routed network lacks. This alone sets priority = DSCP / 8.
    run mlnx_qos -i "$dev" --trust dscp
    # The same for the three marks that are used, said aloud, for ports whose map was changed.
    run mlnx_qos -i "$dev" --dscp2prio set,8,1 --dscp2prio set,26,3 --dscp2prio set,48,6
    # Queue of each priority 0 to 7: KV (1) alone in queue 0, unmarked traffic (0) and what lies between (2) in queue 1.
    # Among strict queues the higher number goes first. Shares are of what strict queues leave, and must add up to 100.
    run mlnx_qos -i "$dev" --prio_tc 1,0,1,3,4,5,6,7 --tsa "$turns" --tcbw "$shares"
    # PFC for the two RDMA classes, priorities 1 and 3: a full buffer pauses that priority, and drops nothing.
    run mlnx_qos -i "$dev" --pfc 0,1,0,1,0,0,0,0
}

undo() {
    run mlnx_qos -i "$dev" --pfc 0,0,0,0,0,0,0,0
    run mlnx_qos -i "$dev" --prio_tc 1,0,2,3,4,5,6,7 --tsa vendor,vendor,vendor,vendor,vendor,vendor,vendor,vendor
    # Forgets the map of DSCP as well.
    run mlnx_qos -i "$dev" --trust pcp
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
    echo "mlnx_qos.sh: there is no interface $dev" >&2
    exit 1
fi
case $floor in
"") turns=ets,ets,strict,strict,strict,strict,strict,strict shares=10,90,0,0,0,0,0,0 ;;
[1-9] | [1-4][0-9]) turns=ets,ets,strict,ets,strict,strict,strict,strict shares=$floor,1,0,$((99 - floor)),0,0,0,0 ;;
*) echo "mlnx_qos.sh: -f $floor: must be 1 to 49" >&2 && exit 2 ;;
esac
case $what in
setup | undo) "$what" ;;
show) run mlnx_qos -i "$dev" ;;
*) usage ;;
esac
