package p2p
