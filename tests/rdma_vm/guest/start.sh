# Second program of the VM, in the host's filesystem: mounts, network, RDMA devices; then the command, its exit code, the end.
# `order.sh` beside it says: folders (array of "mode path"), work_folder, limit_s, and the environment, exported.
exec </dev/null 3>/dev/console
export HOME=/root LANG=C.UTF-8 RDMA_VM=1
say() { read -r up _ </proc/uptime; echo "rdma_vm: $1 at $up s" >&3; }
set_sysctl() { echo "$2" >"/proc/sys/net/$1"; }

say "userspace"
. /control/order.sh
mkdir -p /dev/shm /dev/pts
mount -t devpts devpts /dev/pts
mount -t tmpfs -o mode=1777 shm /dev/shm
hostname rdma-vm
for at in "${!folders[@]}"; do
    read -r mode path <<<"${folders[at]}"
    # What is only read may be cached; what is written is to be seen outside at once.
    [ "$mode" = ro ] && mode=ro,cache=loose
    mkdir -p "$path"
    mount -t 9p -o "$mode,trans=virtio,version=9p2000.L,msize=512000" "folder$at" "$path" || say "no $path"
done 2>&3

# rxe of Linux 6.1 carries nothing out of other network namespaces: both ends are in this one, and still all packets cross the
# cable, since rxe routes by its own interface. Two processes, one on each, are two nodes.
{
    ip link set lo up
    ip link add veth0 type veth peer name veth1
    set_sysctl ipv4/conf/all/rp_filter 0
    for end in 0 1; do
        set_sysctl ipv4/conf/veth$end/rp_filter 0
        set_sysctl ipv4/conf/veth$end/accept_local 1
        set_sysctl ipv6/conf/veth$end/accept_dad 0
        ip link set veth$end mtu 4200 up
        ip addr add 10.77.0.$((end + 1))/24 dev veth$end
    done
    for end in 0 1; do rdma link add rxe$end type rxe netdev veth$end; done
    # Else the first packet to a neighbour waits a second for its address.
    for end in 0 1; do
        address=$(cat /sys/class/net/veth$((1 - end))/address)
        ip neigh replace 10.77.0.$((2 - end)) lladdr "$address" dev veth$end nud permanent
    done
    ulimit -l unlimited
} 2>&3

for port in /sys/class/virtio-ports/vport*; do
    [ "$(cat "$port/name")" = out ] && out=/dev/${port##*/}
done
cd "$work_folder" || say "no $work_folder"
say "command begins"
(exec 3>&-; exec timeout -k 5 "$limit_s" bash /control/command.sh) >"$out" 2>&1
code=$?
[ "$code" = 137 ] && code=124
say "command ended with $code"
echo "$code" >/control/code.part && mv /control/code.part /control/code
sync
echo b >/proc/sysrq-trigger
