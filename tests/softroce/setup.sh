#!/usr/bin/env bash
# Makes a virtual machine with Soft-RoCE from Debian's packages, without installing any, and prints
# the folder that has it: kernel, initrd, and QEMU. One that is there already is left as it is. Each
# version of these files has a folder of its own below the cache of the user.
#
#	setup.sh           make it if it is not there
#	setup.sh --check   fail, with the reason, if it is not there
set -euo pipefail
here=$(cd "$(dirname "$(readlink -f "$0")")" && pwd)
version=$(cat "$here/setup.sh" "$here/init" | sha256sum | cut -c1-12)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/tutti
vm=$cache/softroce-$version

if [ -e "$vm/complete" ]; then
	echo "$vm"
	exit
fi
if [ "${1:-}" = --check ]; then
	echo "there is no virtual machine in $vm (make deps-rdma)" >&2
	exit 1
fi
if [ "$(uname -m)" != x86_64 ] || ! command -v apt-get >/dev/null; then
	echo "softroce: the virtual machine is made from Debian's packages for amd64, on such a machine" >&2
	exit 1
fi
mkdir -p "$cache"
exec 9>"$cache/softroce.lock"
flock 9 # one at a time; the second finds it complete
if [ -e "$vm/complete" ]; then
	echo "$vm"
	exit
fi
# What an interrupted run left has another name than what is complete.
rm -rf "$cache"/softroce-making.*
work=$(mktemp -d "$cache/softroce-making.XXXXXX")
trap 'rm -rf "$work"' EXIT
chmod 755 "$work"

# The packages, with those that they need and that are not installed here. The kernel is unpacked
# without its dependencies.
programs=(qemu-system-x86 busybox-static ibverbs-providers iproute2 perftest)
modules=(net/ipv4/udp_tunnel net/ipv6/ip6_udp_tunnel crypto/crc32_generic drivers/infiniband/core/ib_core
	drivers/infiniband/core/ib_uverbs drivers/infiniband/sw/rxe/rdma_rxe drivers/net/dummy drivers/net/veth)
mkdir "$work/packages" "$work/root" "$work/kernel" "$work/initrd"
fetch() {
	image=$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image-/ {print $2; exit}')
	missing=$(apt-get install --print-uris -y --no-install-recommends "${programs[@]}" |
		awk "/^'/ {sub(/_.*/, \"\", \$2); print \$2}") || return
	# What is installed is fetched too if files of it go into the machine.
	(cd "$work/packages" && apt-get -qq download "$image" $missing "${programs[@]}" 2>"$work/log")
}
fetch || { apt-get -qq update && fetch; } || { cat "$work/log" >&2; exit 1; }
for p in "$work"/packages/*.deb; do
	case $p in */linux-image-*) ;; *) dpkg -x "$p" "$work/root" ;; esac
done
release=${image#linux-image-}
dpkg --fsys-tarfile "$work"/packages/linux-image-*.deb | tar -x -C "$work/kernel" "./boot/vmlinuz-$release" \
	$(printf "./lib/modules/$release/kernel/%s.ko " "${modules[@]}")

# QEMU starts an ELF file at once, and spares the machine the decompression.
python3 - "$work/kernel/boot/vmlinuz-$release" "$work/vmlinux" <<'P'
import lzma, sys
image = open(sys.argv[1], "rb").read()
at = image.find(b"\xfd7zXZ\0")
elf = lzma.LZMADecompressor().decompress(image[at:]) if at > 0 else b""
if not elf.startswith(b"\x7fELF"):
    sys.exit("softroce: the kernel is not compressed with xz")
open(sys.argv[2], "wb").write(elf)
P

# The initrd: busybox, the programs, the provider of Soft-RoCE and the libraries of all of them.
lib=usr/lib/x86_64-linux-gnu
export LD_LIBRARY_PATH=$work/root/$lib:$work/root/lib/x86_64-linux-gnu
cd "$work/initrd"
mkdir -p bin etc/libibverbs.d proc sys dev tmp run var "$lib/libibverbs" lib/modules
ln -s /run var/run
cp "$work/root/bin/busybox" bin/
for a in sh mount insmod cat stty poweroff timeout mkdir sync sleep; do ln -s busybox "bin/$a"; done
find_program() {
	for d in "$work/root" ""; do
		for b in bin sbin usr/bin usr/sbin; do
			[ -f "$d/$b/$1" ] && readlink -f "$d/$b/$1" && return
		done
	done
	echo "softroce: no program $1" >&2
	return 1
}
benchmarks=(ib_write_bw ib_write_lat)
for p in ip rdma "${benchmarks[@]}"; do cp "$(find_program $p)" "bin/$p"; done
cp "$work/root/$lib"/libibverbs/librxe-rdmav*.so "$lib/libibverbs/"
echo "driver rxe" >etc/libibverbs.d/rxe.driver
libverbs=$(ldd "$lib"/libibverbs/librxe-*.so | awk '$1 == "libibverbs.so.1" {print $3}')
# For threads that are cancelled. Not every user has ldconfig in PATH.
libgcc=$(PATH=$PATH:/usr/sbin:/sbin ldconfig -p | awk '$1 == "libgcc_s.so.1" {print $NF; exit}')
for f in bin/ip bin/rdma "${benchmarks[@]/#/bin/}" "$lib"/libibverbs/*.so "$libverbs" "$libgcc"; do
	ldd "$f" | awk '$2 == "=>" {print $3} $1 ~ /^\// {print $1}'
	case $f in /*) echo "$f" ;; esac
done | sort -u | while read -r f; do
	install -D -m 755 "$(readlink -f "$f")" "./${f#"$work/root"}"
done
for m in "${modules[@]}"; do
	cp "$work/kernel/lib/modules/$release/kernel/$m.ko" lib/modules/
	echo "${m##*/}.ko" >>lib/modules/order
done
install -m 755 "$here/init" init
find . | "$work/root/bin/busybox" cpio -o -H newc 2>/dev/null | gzip -1 >"$work/base.cpio.gz"
cd "$work"
rm -rf packages kernel log
echo "$release" >complete

rm -rf "$vm"
mv "$work" "$vm"
trap - EXIT
echo "$vm"
