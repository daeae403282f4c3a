// Package memheap divides a range of registered memory into blocks: queues, doorbells and other
// control structures that a device and a processor share. It computes with offsets and never
// touches the memory.
//
// A Heap takes the lowest place that fits: address-ordered first fit, which wastes less memory in
// the long run than policies that are as fast (Wilson, Johnstone, Neely and Boles, "Dynamic Storage
// Allocation: A Survey and Critical Review", 1995; Johnstone and Wilson, "The Memory Fragmentation
// Problem: Solved?", 1998). A freed block is united with free neighbours at once. The memory that
// an alignment skips stays free.
//
// All blocks, allocated and free, are nodes of a treap (Seidel and Aragon, "Randomized Search
// Trees", 1996), ordered by offset. Each node knows, for every alignment, the largest block that
// its subtree has room for. So Alloc and Free take a time that grows with the logarithm of the
// number of blocks, and Alloc fails only if the block fits nowhere.
package memheap
