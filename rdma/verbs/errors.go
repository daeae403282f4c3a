package verbs

import (
	"syscall"

	"tutti/rdma"
)

// callKind is what a failed call was to do, for advice.
type callKind int

const (
	callList callKind = iota
	callOpen
	callQuery
	callRegister
	callCreate
	callModify
	callPost
	callDestroy
)

// advise returns what to do about a call that failed with errno, "" if nothing is known.
func advise(kind callKind, errno syscall.Errno) string {
	switch {
	case errno == syscall.ENOSYS && kind == callList:
		return "load the kernel's module: modprobe ib_uverbs"
	case errno == syscall.ENODEV || errno == syscall.ENXIO:
		return "the device was removed, or its kernel module"
	case errno == syscall.ENOENT && kind == callOpen:
		return "the device is being removed, or this container has no /dev/infiniband/uverbs*"
	case (errno == syscall.EACCES || errno == syscall.EPERM) && (kind == callList || kind == callOpen):
		return "allow this user to read and write /dev/infiniband/uverbs*"
	case errno == syscall.ENOMEM && kind == callRegister:
		return "raise the limit of locked memory (ulimit -l unlimited, or LimitMEMLOCK=infinity in the service), " +
			"or register less"
	case errno == syscall.EFAULT && kind == callRegister:
		return "the memory is not mapped, or cannot be written although the rights ask for it"
	case (errno == syscall.EOPNOTSUPP || errno == syscall.ENOSYS) && kind == callRegister:
		return "the library, the kernel or the device has no DMA buffers"
	case errno == syscall.ENOMEM && kind == callCreate:
		return "the device's limit was reached, or that of locked memory (ulimit -l unlimited)"
	case errno == syscall.EINVAL && kind == callCreate:
		return "compare it with the device's Attributes"
	case errno == syscall.ENOMEM && kind == callPost:
		return "the queue is full: poll completions first"
	case (errno == syscall.EINVAL || errno == syscall.ENODATA) && kind == callModify:
		return "the queue pair is in another state, or the port has no such address, partition key, MTU or right"
	case errno == syscall.ENETUNREACH || errno == syscall.EHOSTUNREACH || errno == syscall.ETIMEDOUT &&
		kind == callModify:
		return "there is no route from the chosen address to the peer's: choose another one"
	case errno == syscall.EBUSY && kind == callDestroy:
		return "close what uses it first"
	}
	return ""
}

// eventKind returns the kind of the verbs' event number.
func eventKind(number int) rdma.EventKind {
	switch number {
	case 0: // CQ_ERR
		return rdma.CQFailed
	case 1, 2, 3: // QP_FATAL, QP_REQ_ERR, QP_ACCESS_ERR
		return rdma.QPFailed
	case 8: // DEVICE_FATAL
		return rdma.DeviceRemoved
	case 9: // PORT_ACTIVE
		return rdma.PortUp
	case 10: // PORT_ERR
		return rdma.PortLost
	case 18: // GID_CHANGE
		return rdma.GIDsChanged
	}
	return rdma.OtherEvent
}
