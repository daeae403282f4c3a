package bootstrap

// Lose has a handle on an etcd take its lease for lost.
func Lose(s Store, why error) { s.(*etcdStore).lose(why) }
