package rdmatest

import (
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// Command runs a command of the virtual machine.
func Command(t testing.TB, name string, args ...string) {
	t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s %q: %v: %s", name, args, err, out)
	}
}

// Veth makes two devices, each at an end of a virtual cable, and returns them with functions
// that pull the cable and put it back. The addresses of both ends are this machine's: rules have
// packets for either of them leave by the other.
func Veth(t testing.TB) (devices [2]string, down, up func()) {
	t.Helper()
	devices = [2]string{"rv0", "rv1"}
	ends, addresses := [2]string{"v0", "v1"}, [2]string{"10.98.0.1", "10.98.0.2"}
	macs := [2]string{"02:00:00:00:00:01", "02:00:00:00:00:02"}
	set := func(path, value string) {
		if err := os.WriteFile(path, []byte(value), 0); err != nil {
			t.Fatal(err)
		}
	}
	Command(t, "ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
	Command(t, "ip", "rule", "add", "pref", "200", "lookup", "local")
	Command(t, "ip", "rule", "del", "pref", "0", "lookup", "local")
	for i, e := range ends {
		for name, value := range map[string]string{"accept_local": "1", "rp_filter": "0", "arp_ignore": "1"} {
			set("/proc/sys/net/ipv4/conf/"+e+"/"+name, value)
		}
		set("/proc/sys/net/ipv6/conf/"+e+"/disable_ipv6", "1")
		Command(t, "ip", "link", "set", e, "mtu", "4500", "address", macs[i])
		Command(t, "ip", "addr", "add", addresses[i]+"/32", "dev", e)
		Command(t, "ip", "rule", "add", "pref", fmt.Sprint(100+i), "oif", e, "lookup", fmt.Sprint(100+i))
	}
	// Routes and neighbours go with an interface that is down. One process does it all at once.
	commands := fmt.Sprintf("link set %s up\nlink set %s up\n", ends[0], ends[1])
	for i, e := range ends {
		commands += fmt.Sprintf("route replace %s dev %s table %d\nneigh replace %s lladdr %s dev %s\n",
			addresses[1-i], e, 100+i, addresses[1-i], macs[1-i], e)
	}
	up = func() {
		t.Helper()
		ip := exec.Command("ip", "-batch", "-")
		ip.Stdin = strings.NewReader(commands)
		if out, err := ip.CombinedOutput(); err != nil {
			t.Fatalf("%s: %v: %s", commands, err, out)
		}
	}
	up()
	for i, d := range devices {
		Command(t, "rdma", "link", "add", d, "type", "rxe", "netdev", ends[i])
	}
	t.Cleanup(func() {
		for _, d := range devices {
			Command(t, "rdma", "link", "delete", d)
		}
		Command(t, "ip", "rule", "add", "pref", "0", "lookup", "local")
		Command(t, "ip", "rule", "del", "pref", "200", "lookup", "local")
		for i := range ends {
			Command(t, "ip", "rule", "del", "pref", fmt.Sprint(100+i))
		}
		Command(t, "ip", "link", "del", ends[0])
	})
	return devices, func() { t.Helper(); Command(t, "ip", "link", "set", ends[1], "down") }, up
}
