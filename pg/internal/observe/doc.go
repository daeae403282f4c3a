// Package observe answers for a rank: to those who ask what it does, in files that outlive it, and
// as metrics. What groups do is recorded through a Track each; nothing else is counted for it.
package observe
